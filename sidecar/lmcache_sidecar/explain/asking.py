"""Asks the HTTP servers of a sidecar and of an engine, for commands."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_URL = "http://127.0.0.1:9464"
_TIMEOUT_SECONDS = 5.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxy of ``http_proxy``: a proxy reaches neither this machine nor a pod's address."""


class ExplainError(Exception):
    """There is no answer. The message says what to do."""


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the option that finds the sidecar."""
    about = "address of the sidecar's HTTP server (default: %(default)s)"
    parser.add_argument("--url", default=_URL, help=about)


def ask(url: str, path: str, question: Any = None, *, server: str = "sidecar", option: str = "--url") -> Any:
    """Return the parsed JSON of a page. Sends ``question`` as JSON, unless it is None. Raises ExplainError.

    ``server`` and ``option`` are for messages: what answers, and the option with its address.
    """
    body = None if question is None else json.dumps(question).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, body, headers)
        with _opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = error.read(1000).decode(errors="replace").strip()
        raise ExplainError(f"{url}{path}: {error.code}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise ExplainError(
            f"no {server} answers at {url}: {reason}. Give the address of its HTTP server with {option}"
        ) from error
