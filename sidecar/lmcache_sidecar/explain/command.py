"""``lmcache-sidecar explain``: prints why prompts were computed, as the sidecar at a URL counts them."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from lmcache.explain import tables

_URL = "http://127.0.0.1:9464"
_TIMEOUT_SECONDS = 5.0
_ABOUT = """\
Show where the tokens of prompts came from, and why the others were computed.

Without --request-id: all requests since the sidecar started, with advice. With it: one of the last 1,000
requests.
"""
_EXIT = """\
exit status: 0; 1 if the sidecar does not answer, or does not know the request

example: lmcache-sidecar explain --request-id cmpl-8b2f
"""


class ExplainError(Exception):
    """The sidecar has no answer. The message says what to do."""


def add_arguments(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser(
        "explain",
        help="show why prompts were computed",
        description=_ABOUT,
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", default=_URL, help="address of the sidecar's HTTP server (default: %(default)s)"
    )
    parser.add_argument(
        "--request-id", metavar="ID", help="request id as in the engine's answer, or a part of it"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        answer, lines = _explain(arguments)
        text = json.dumps(answer, indent=2) if arguments.output == "json" else "\n".join(lines)
    except (AttributeError, LookupError, TypeError) as error:
        print(
            f"lmcache-sidecar: error: the server at {arguments.url} is no sidecar: {error}", file=sys.stderr
        )
        return 1
    except ExplainError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _explain(arguments: argparse.Namespace) -> tuple[Any, Iterator[str]]:
    if arguments.request_id is None:
        stats = _get(arguments.url, "/stats")
        if "causes" not in stats:
            reason = stats.get("not_ready_reason") or f"version {stats.get('version')} does not count causes"
            raise ExplainError(f"the sidecar at {arguments.url} has no causes: {reason}")
        return stats["causes"], tables.overview(stats["causes"])
    query = urllib.parse.urlencode({"id": arguments.request_id}, errors="replace")
    requests = _get(arguments.url, f"/requests?{query}")["requests"]
    if not requests:
        raise ExplainError(
            f"none of the last requests has {arguments.request_id!r} in its id: the sidecar remembers 1,000"
        )
    return requests[0], tables.request(requests[0])


def _get(url: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = error.read(1000).decode(errors="replace").strip()
        raise ExplainError(f"{url}{path}: {error.code}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise ExplainError(
            f"no sidecar answers at {url}: {reason}. Give the address of its HTTP server with --url"
        ) from error
