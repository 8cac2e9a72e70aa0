"""The page ``/requests``: the causes of recent requests, the newest first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from urllib.parse import parse_qsl

from lmcache_sidecar.explain.requests import ExplainedRequest

_MAX_ANSWER = 100


def answer(requests: Iterable[ExplainedRequest], query: str) -> bytes:
    """Return the JSON text of up to 100 requests whose ids contain the ``id`` of the query.

    Raises ValueError for a bad query.
    """
    wanted = ""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "id":
            raise ValueError(f"unknown parameter {name[:32]!r}: use id")
        wanted = value
    matching = (request for request in requests if wanted in request.request_id)
    fields = [request.document() for request in islice(matching, _MAX_ANSWER)]
    return json.dumps({"version": 1, "requests": fields}).encode() + b"\n"
