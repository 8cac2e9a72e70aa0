"""Pods on nodes that are lost: when they are given up, and what is said meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.components.base import Observed
from lmcache_operator.components.nodes import abandoned, doubtful_nodes, node_problems

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def before_now(minutes: float) -> str:
    return (NOW - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def ready(status: str, minutes: float = 0) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "lastTransitionTime": before_now(minutes)}


def pod(status: str = "False", minutes: float = 60, *, ends: float | None = None) -> dict[str, Any]:
    """On node ``a``, ready or not since so many minutes; ``ends``: minutes since its grace is over."""
    metadata = {"name": "p", "uid": "u"} | ({} if ends is None else {"deletionTimestamp": before_now(ends)})
    conditions = [{"type": "Initialized", "status": "True"}, ready(status, minutes)]
    return {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"conditions": conditions}}


def node(status: str, minutes: float) -> dict[str, Any]:
    return {
        "status": {"conditions": [{"type": "MemoryPressure", "status": "Unknown"}, ready(status, minutes)]}
    }


def seen(pods: list[dict[str, Any]], nodes: dict[str, Any], refusal: str = "") -> Observed:
    return Observed(resource={}, pods=tuple(pods), nodes=nodes, node_refusal=refusal, now=NOW)


CASES = [
    # pod, its node, whether it is given up, whether the node is told to be lost
    (pod(ends=1), node("Unknown", 6), True, True),
    (pod(ends=-1), node("Unknown", 6), True, True),
    (pod(ends=1), node("Unknown", 4), False, True),
    (pod(), node("Unknown", 60), False, True),
    (pod(ends=1), node("False", 6), True, True),
    (pod(ends=-1), node("False", 6), False, True),
    (pod(ends=60), node("True", 60), False, False),
    (pod(), node("True", 60), False, False),
    (pod(minutes=60), None, False, True),
    (pod(minutes=4, ends=1), None, False, True),
    (pod(minutes=6, ends=1), None, True, True),
    (pod("True", 6), None, False, False),
    (pod("True", 6, ends=1), node("Unknown", 6), True, True),
]


@pytest.mark.parametrize(("found", "its_node", "is_given_up", "is_told"), CASES)
def test_a_pod_is_given_up_when_its_node_was_lost_long_enough(
    found: dict[str, Any], its_node: dict[str, Any] | None, is_given_up: bool, is_told: bool
) -> None:
    observed = seen([found], {"a": its_node})
    assert list(abandoned(observed)) == ([found] if is_given_up else [])
    problems = list(node_problems(observed))
    assert [(problem.reason, "node a" in problem.message) for problem in problems] == (
        [("NodeLost", True)] if is_told else []
    )


def test_the_node_of_a_pod_that_serves_or_is_not_scheduled_is_not_asked_for() -> None:
    waiting = pod()
    del waiting["spec"]["nodeName"]
    assert doubtful_nodes((pod("True"), waiting)) == set()
    assert doubtful_nodes((pod("False"), pod("True", ends=1))) == {"a"}
    assert list(abandoned(seen([waiting], {}))) == []


def test_one_pod_stands_for_all_and_the_words_stay_the_same() -> None:
    first, other = pod(), pod(ends=1)
    (problem,) = node_problems(seen([first, other], {"a": node("Unknown", 6)}))
    assert "has not been ready since 11:54:00 UTC" in problem.message
    (problem,) = node_problems(seen([first], {"a": None}))
    assert "does not exist any more" in problem.message


def test_without_the_right_to_see_nodes_pods_that_do_not_end_are_told() -> None:
    assert list(node_problems(seen([pod(), pod(ends=4)], {}, "nodes is forbidden"))) == []
    overdue = seen([pod(ends=6)], {}, "nodes is forbidden")
    assert list(abandoned(overdue)) == []
    (problem,) = node_problems(overdue)
    assert problem.reason == "Refused"
    assert problem.message.endswith("may not see whether its node is lost: nodes is forbidden")


@given(
    st.sampled_from(["True", "False"]),
    st.one_of(st.none(), st.floats(-10, 100)),
    st.one_of(st.none(), st.tuples(st.sampled_from(["True", "False", "Unknown"]), st.floats(0, 100))),
    st.floats(0, 100),
)
def test_no_pod_that_serves_or_whose_node_is_well_is_ever_given_up(
    status: str, ends: float | None, its_node: tuple[str, float] | None, minutes: float
) -> None:
    found = pod(status, minutes, ends=ends)
    given_up = list(abandoned(seen([found], {"a": its_node and node(*its_node)})))
    if given_up:
        assert ends is not None
        assert its_node is None or (its_node[0] != "True" and its_node[1] >= 4.9)
        assert status != "True" or ends is not None
