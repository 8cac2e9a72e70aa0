"""Adding up the reports of several sidecars."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.explain import merge

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def report(**tokens: int) -> dict[str, Any]:
    """Return the report of one sidecar with these tokens by cause."""
    branches = [
        {"prefix": "ab", "depth_tokens": 64, "num_requests": 1, "num_tokens": tokens.get("diverged", 0)}
    ]
    return {
        "causes": {
            "prompt_tokens": sum(tokens.values()),
            "cause_tokens": tokens,
            "diverged_requests": {"64": 1},
            "diverged_tokens": {"64": tokens.get("diverged", 0)},
            "branches": branches,
        }
    }


def test_causes_of_two_sidecars_add_up() -> None:
    merged = merge.causes([report(memory=256, diverged=10), report(memory=512, new=5)])
    assert merged == {
        "prompt_tokens": 783,
        "cause_tokens": {"memory": 768, "diverged": 10, "new": 5},
        "diverged_requests": {"64": 2},
        "diverged_tokens": {"64": 10},
        "branches": [{"prefix": "ab", "depth_tokens": 64, "num_requests": 2, "num_tokens": 10}],
    }


def test_reasons_of_engines_that_share_no_kv_are_listed_once() -> None:
    reports = [{"private_reason": reason} for reason in ("weights", "", None, 5, "weights", "a\nseed")]
    assert merge.reasons([*reports, {}, [], None], "private_reason") == ["a seed", "weights"]


@pytest.mark.parametrize("value", [True, -1, "7", None, [], float("nan"), float("inf"), 1 << 64])
def test_values_that_are_no_counts_count_as_nothing(value: Any) -> None:
    assert merge.total([{"a": {"b": value}}, {"a": {"b": 2}}], "a", "b") == 2


@given(st.lists(st.dictionaries(st.sampled_from(["causes", "x"]), ANY, max_size=2), max_size=3))
def test_any_report_can_be_merged(reports: list[Any]) -> None:
    merged = merge.causes(reports)
    assert all(number > 0 for number in merged["cause_tokens"].values())
    assert merged["prompt_tokens"] >= 0


@given(st.lists(st.fixed_dictionaries({"causes": st.fixed_dictionaries({"branches": ANY | st.lists(ANY)})})))
def test_any_list_of_branches_can_be_merged(reports: list[Any]) -> None:
    assert len(merge.causes(reports)["branches"]) <= 10
