"""The page about hints in effect, and their figures."""

import asyncio
import json
from typing import Any

import pytest

from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.hints import HintBoard, Retained
from lmcache_sidecar.pages.hints import MAX_LISTED, hints_part, page_of
from lmcache_sidecar.pages.metrics import render
from lmcache_sidecar.pages.stats import document


def retained(number: int = 1, **changes: Any) -> Retained:
    """A hint that retains ``number`` rows of 1,000 bytes and 16 tokens each."""
    sizes = {"num_rows": number, "num_bytes": 1000 * number, "num_tokens": 16 * number}
    ids = {"message_id": "session 7", "action_id": "1", "request_id": f"cmpl-{number}"}
    return Retained(
        **{"tenant": "search", "priority": 0, "seconds_left": 9.87654, "saved_tokens": 0}
        | ids | sizes | changes
    )  # fmt: skip


def board_of(*listed: Retained) -> HintBoard:
    board = HintBoard(60.0)
    board.retained = lambda: [*listed]
    return board


def test_page_has_all_fields_of_a_hint() -> None:
    page = json.loads(page_of([retained(3, priority=-5, saved_tokens=32)], ""))
    assert page == {
        "version": 1,
        "total": 1,
        "retained": [
            {
                "tenant": "search", "message_id": "session 7", "action_id": "1", "request_id": "cmpl-3",
                "rows": 3, "bytes": 3000, "tokens": 48, "priority": -5, "seconds_left": 9.877,
                "saved_tokens": 32,
            },
        ],
    }  # fmt: skip


def test_page_is_bounded_and_has_the_largest_hints() -> None:
    page = json.loads(page_of([retained(number) for number in range(1, 1001)], ""))
    assert page["total"] == 1000
    assert [each["rows"] for each in page["retained"]] == [*range(1000, 1000 - MAX_LISTED, -1)]


def test_page_refuses_a_query() -> None:
    with pytest.raises(ValueError, match="remove the query"):
        page_of([], "tenant=search")


def test_figures_are_sums_of_all_hints() -> None:
    part = document([hints_part(board_of(retained(2), retained(3)))])["hints"]
    assert (part["retained_rows"], part["retained_bytes"]) == (5, 5000)
    assert (part["actions"], part["unused"]) == ({}, 0)


def test_counter_of_actions_has_two_labels() -> None:
    board = board_of()
    board.stats.actions["retain accepted"] += 2
    board.stats.actions["prefetch refused"] += 1
    text = asyncio.run(render(CallStats(), [hints_part(board)])).decode()
    assert 'lmcache_hint_actions_total{action="retain",outcome="accepted"} 2.0' in text
    assert 'lmcache_hint_actions_total{action="prefetch",outcome="refused"} 1.0' in text
    assert "lmcache_hint_retained_rows 0.0" in text
