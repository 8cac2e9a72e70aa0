"""Hints in effect: the page ``/hints``, and the figures of hints. Tenants have the names of their budgets."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence

from lmcache_sidecar.hints import HintBoard, HintStats, Retained
from lmcache_sidecar.pages.stats import Figure, StatsPart, declared, read

MAX_LISTED = 256
"""Hints on the page: those that retain most bytes."""

RETAINED: tuple[Figure[Sequence[Retained]], ...] = (
    Figure(
        "retained_rows",
        "Rows that hints retain now",
        lambda retained: sum(each.num_rows for each in retained),
    ),
    Figure(
        "retained_bytes",
        "Bytes of retained_rows",
        lambda retained: sum(each.num_bytes for each in retained),
    ),
)
FIGURES = (*declared(HintStats), *RETAINED)


def hints_part(board: HintBoard) -> StatsPart:
    """Return the statistics of hints."""
    figures = read(declared(HintStats), board.stats) | read(RETAINED, board.retained())
    return StatsPart("hints", {}, figures, "lmcache_hint")


def page_of(retained: Sequence[Retained], query: str) -> bytes:
    """Return the JSON text about what hints retain, the most bytes first.

    Raises ValueError if the URL has a query.
    """
    if query:
        raise ValueError("this page has no parameters: remove the query")
    largest = heapq.nlargest(MAX_LISTED, retained, key=lambda each: each.num_bytes)
    fields = [
        {
            "tenant": each.tenant,
            "message_id": each.message_id,
            "action_id": each.action_id,
            "request_id": each.request_id,
            "rows": each.num_rows,
            "bytes": each.num_bytes,
            "tokens": each.num_tokens,
            "priority": each.priority,
            "seconds_left": round(each.seconds_left, 3),
            "saved_tokens": each.saved_tokens,
        }
        for each in largest
    ]
    return json.dumps({"version": 1, "total": len(retained), "retained": fields}).encode() + b"\n"
