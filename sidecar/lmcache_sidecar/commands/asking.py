"""Asks the HTTP server of a sidecar, for commands."""

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


def ask(url: str, path: str) -> Any:
    """Return the parsed JSON of a page. Raises ExplainError."""
    try:
        with _opener.open(url.rstrip("/") + path, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = error.read(1000).decode(errors="replace").strip()
        raise ExplainError(f"{url}{path}: {error.code}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise ExplainError(
            f"no sidecar answers at {url}: {reason}. Give the address of its HTTP server with --url"
        ) from error
