"""Hints that retain rows, as the page ``/hints`` of sidecars lists them: a table, and plain data. Pure.

Pages come from users' pods and are not trusted; see ``merge``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_store.common.text import gigabytes, plain, table
from lmcache_store.common.units import format_seconds
from lmcache_store.explain.merge import count, part
from lmcache_store.hints import MAX_PRIORITY

NOTHING = (
    'No hint retains KV now. To retain that of a prompt, add to its request: "kv_transfer_params": '
    '{"lmcache.hints": [{"action_type": "retain"}]}'
)
_TITLES = "POD", "TENANT", "HINT", "TOKENS", "BYTES", "PRIORITY", "ENDS-IN", "SAVED"
_MAX_LISTED = 256
_HINT_CHARACTERS = 48


def documents(page: Any) -> list[dict[str, Any]]:
    """Return the hints of a page as plain data, which programs may read."""
    listed = part(page).get("retained")
    hints = listed[:_MAX_LISTED] if isinstance(listed, list) else []
    return [_document(hint) for hint in hints if isinstance(hint, Mapping)]


def _document(hint: Mapping[str, Any]) -> dict[str, Any]:
    priority = hint.get("priority")
    is_valid = isinstance(priority, int) and abs(priority) <= MAX_PRIORITY
    return {
        "tenant": plain(hint.get("tenant")),
        "messageId": plain(hint.get("message_id")),
        "actionId": plain(hint.get("action_id")),
        "requestId": plain(hint.get("request_id")),
        "rows": int(count(hint.get("rows"))),
        "bytes": int(count(hint.get("bytes"))),
        "tokens": int(count(hint.get("tokens"))),
        "priority": int(priority) if is_valid and priority else 0,
        "secondsLeft": count(hint.get("seconds_left")),
        "savedTokens": int(count(hint.get("saved_tokens"))),
    }


def lines(pages: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield the table of all hints, from pages with the names of their pods; without hints, what to do.

    A single page with an empty name needs no column for pods.
    """
    hints = [(pod, hint) for pod, page in pages for hint in documents(page)]
    if not hints:
        yield NOTHING
        return
    rows = [_TITLES, *(_row(pod, hint) for pod, hint in hints)]
    first = 0 if any(pod for pod, _ in pages) else 1
    yield from table([row[first:] for row in rows], right=(number - first for number in (3, 4, 5, 6, 7)))
    more = sum(int(count(part(page).get("total"))) for _, page in pages) - len(hints)
    if more > 0:
        yield f"and {more:,} smaller hint{'s' if more > 1 else ''}"


def _row(pod: str, hint: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a hint, which is named by its message, or else by its request."""
    name = f"{hint['messageId'] or hint['requestId']}/{hint['actionId']}"
    return (
        pod,
        hint["tenant"],
        plain(name, _HINT_CHARACTERS),
        f"{hint['tokens']:,}",
        gigabytes(hint["bytes"]),
        f"{hint['priority']}",
        format_seconds(hint["secondsLeft"]),
        f"{hint['savedTokens']:,}",
    )
