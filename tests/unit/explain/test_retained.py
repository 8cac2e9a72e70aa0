"""Hints that retain rows, in pages of sidecars that may be old, hostile or empty."""

from typing import Any

import pytest

from lmcache_store.explain.retained import NOTHING, documents, lines

ESCAPES = "\x1b]0;title\x07\x9b2J\u202e"
HINT = {
    "tenant": "search", "message_id": "session 7", "action_id": "1", "request_id": "cmpl-8", "rows": 12,
    "bytes": 2_500_000_000, "tokens": 12_288, "priority": -10, "seconds_left": 250.4, "saved_tokens": 4096,
}  # fmt: skip


def page(*hints: Any, **changes: Any) -> dict[str, Any]:
    return {"version": 1, "total": len(hints), "retained": [*hints]} | changes


def test_table_names_hints_by_message_or_request() -> None:
    assert [*lines([("pod-0", page(HINT)), ("pod-1", page(HINT | {"message_id": "", "priority": 5}))])] == [
        "POD    TENANT  HINT         TOKENS  BYTES  PRIORITY  ENDS-IN  SAVED",
        "pod-0  search  session 7/1  12,288  2.50G       -10       4m  4,096",
        "pod-1  search  cmpl-8/1     12,288  2.50G         5       4m  4,096",
    ]


def test_table_of_a_single_sidecar_has_no_pods() -> None:
    title, _ = lines([("", page(HINT))])
    assert title.startswith("TENANT  HINT")


def test_table_counts_hints_that_pages_leave_out() -> None:
    assert [*lines([("a", page(HINT, total=300)), ("b", page(HINT))])][-1] == "and 299 smaller hints"


@pytest.mark.parametrize("pages", [[], [("a", page())], [("a", {}), ("b", [1])], [("a", {"retained": {}})]])
def test_empty_table_says_how_to_send_a_hint(pages: Any) -> None:
    assert [*lines(pages)] == [NOTHING]


@pytest.mark.parametrize("value", [None, True, [], {}, "many", -1, float("nan"), 10**30, ESCAPES])
def test_hostile_page_is_shown_without_escapes(value: Any) -> None:
    hostile = page(5, dict.fromkeys(HINT, value), total=value)
    shown = [*lines([("pod-0", hostile)])]
    assert len(shown) == 2
    assert all(character.isprintable() for line in shown for character in line)
    (plain,) = documents(hostile)
    assert not any(plain[name] for name in ("rows", "tokens", "secondsLeft"))


def test_number_of_hints_of_a_page_is_bounded() -> None:
    assert len(documents(page(*[HINT] * 1000))) == 256
