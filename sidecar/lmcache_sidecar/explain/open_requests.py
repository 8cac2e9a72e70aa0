"""Requests whose engines have not reported their times yet. Pure.

The causes of loads are counted at the end, because a load may fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from lmcache_client.rpc.times import RequestTimes
from lmcache_sidecar.explain.requests import ExplainedRequest

_MAX_REQUESTS = 4096
"""More requests than engines of one sidecar have under way."""


class EndedRequest(NamedTuple):
    """The end of a request, as its engine reports it."""

    engine: bytes
    times: RequestTimes


class OpenRequests:
    """Requests that have not ended, by engine and id. Their number is bounded."""

    def __init__(self, count: Callable[[ExplainedRequest], None]) -> None:
        """``count``: called with each request whose causes are final, unless it is counted already."""
        self._count = count
        self._requests: OrderedDict[tuple[bytes, str], ExplainedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: ExplainedRequest) -> None:
        """Add a request. An older request of the same id does not end any more."""
        key = request.engine.uuid, request.request_id
        self._give_up(key)
        self._requests[key] = request
        if len(self._requests) > _MAX_REQUESTS:
            self._give_up(next(iter(self._requests)))

    def end(self, ended: EndedRequest) -> ExplainedRequest | None:
        """Note the times of a request, and return it. Returns None if it is not known."""
        request = self._requests.pop((ended.engine, ended.times.request_id), None)
        if request is None:
            return None
        request.times = ended.times
        if not request.is_counted:
            request.end_load(ended.times)
            self._count(request)
        return request

    def end_engine(self, engine: bytes) -> None:
        """Count all requests of an engine that reports nothing any more."""
        for key in [key for key in self._requests if key[0] == engine]:
            self._give_up(key)

    def _give_up(self, key: tuple[bytes, str]) -> None:
        request = self._requests.pop(key, None)
        if request is not None and not request.is_counted:
            self._count(request)
