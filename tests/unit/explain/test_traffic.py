"""Rates from two reports of a sidecar, and the figures of several pods."""

import math
from typing import Any

import pytest

from lmcache_store.explain.traffic import SidecarAnswer, document, pod_figures, rates


def report(uptime: float, **parts: Any) -> dict[str, Any]:
    """A report of a sidecar that is ready, with rows of 1,000 bytes."""
    parts.setdefault("causes", {"cause_tokens": {}})
    parts.setdefault("memory", {"used_rows": 10, "used_bytes": 10_000, "removed": {}})
    return {"uptime_seconds": uptime, "is_ready": True, **parts}


def tokens(**by_cause: int) -> dict[str, Any]:
    return {"cause_tokens": by_cause, "prompt_tokens": sum(by_cause.values())}


def test_rates_are_differences_over_the_sidecars_own_time():
    before = report(10.0, lookups={"num_lookups": 5}, causes=tokens(memory=100, new=50, tail=6))
    after = report(14.0, lookups={"num_lookups": 13}, causes=tokens(memory=500, new=90, tail=10, disk=8))
    measured = rates(before, after)
    assert measured is not None
    assert measured.requests == 2.0
    none = dict.fromkeys(("engine", "peers", "remote", "blended"), 0)
    assert measured.tokens == none | {"memory": 100.0, "disk": 2.0, "computed": 11.0}


def test_traffic_of_tiers_counts_rows_with_the_mean_size_of_rows_in_memory():
    memory = {"used_rows": 10, "used_bytes": 10_000, "removed": {"evicted": 4}}
    lookups = {"kv_bytes_per_token": 7, "row_bytes": 5_000, "loaded_tokens": {"memory": 0, "disk": 0}}
    before = report(1.0, memory=memory, lookups=lookups, disk={"promoted": 1, "written": 2})
    after = report(
        3.0,
        memory={"used_rows": 12, "used_bytes": 12_000, "removed": {"evicted": 10}},
        lookups=lookups | {"loaded_tokens": {"memory": 10, "disk": 4}},
        disk={"promoted": 5, "written": 8},
    )
    measured = rates(before, after)
    assert measured is not None
    assert measured.load_bytes == {"memory": 7 * 14 / 2, "disk": 4 * 1000 / 2, "peers": 0, "remote": 0}
    # Two more rows are in memory, six were evicted, and four of them came from the disk.
    written = {"memory": (2000 + 6000 - 4000) / 2, "disk": 6 * 1000 / 2, "peers": 0, "remote": 0}
    assert measured.write_bytes == written


@pytest.mark.parametrize("uptime", [4.0, 12.0], ids=["time fell", "a counter fell"])
def test_restarted_sidecar_counts_from_its_start(uptime):
    before = report(10.0, causes=tokens(new=10_000))
    measured = rates(before, report(uptime, causes=tokens(new=int(100 * uptime))))
    assert measured is not None
    assert measured.tokens["computed"] == 100.0
    assert measured.write_bytes["memory"] == 0  # rows that it adopted were not stored again


@pytest.mark.parametrize("value", [None, "9", -1, math.nan, math.inf, [], True, {"x": {}}, 1 << 70])
def test_values_of_a_wrong_type_count_as_nothing(value):
    parts = ("lookups", "causes", "memory", "disk", "remote")
    counted = dict.fromkeys(
        ("num_lookups", "cause_tokens", "removed", "used_bytes", "used_rows", "promoted"), value
    )
    measured = rates({"uptime_seconds": 1}, {"uptime_seconds": 2, **dict.fromkeys(parts, counted)})
    assert measured is not None
    assert sum(measured.tokens.values()) == measured.requests == 0
    assert rates({}, {"uptime_seconds": value}) is rates(report(10.0), report(10.0)) is None


def answer(uptime: float, uid: str = "uid", number: int = 0, **parts: Any) -> SidecarAnswer:
    """The report of a pod; without an uptime, it gave no answer."""
    if not uptime:
        return SidecarAnswer(uid, f"pod-{number}", "demo", problem="no answer within 2 s")
    return SidecarAnswer(uid, f"pod-{number}", "demo", report(uptime, **parts))


def test_missed_answers_and_new_pods_have_no_rates():
    first = answer(10.0, causes=tokens(new=0))
    (pod,) = pod_figures([], [first])
    assert (pod["problem"], pod["tokensPerSecond"]) == ("", None)
    (pod,) = pod_figures([first], [answer(0.0)])
    assert (pod["problem"], pod["tokensPerSecond"]) == ("no answer within 2 s", None)
    (pod,) = pod_figures([answer(0.0)], [first])
    assert pod["tokensPerSecond"] is None
    (pod,) = pod_figures([first], [answer(20.0, causes=tokens(new=1000))])
    assert pod["tokensPerSecond"]["computed"] == 100.0
    (pod,) = pod_figures([first], [answer(30.0, uid="of a new pod with this name")])
    assert pod["tokensPerSecond"] is None


def test_totals_add_up_pods_and_name_the_first_open_circuit():
    remotes = [
        {"is_reachable": bool(number), "off_reason": "refused\x1b[2J", "num_queued_loads": 3}
        for number in range(3)
    ]
    readings = [
        [
            answer(seconds, f"{n}", n, causes=tokens(memory=int(10 * seconds)), remote=remote)
            for n, remote in enumerate(remotes)
        ]
        for seconds in (1.0, 2.0)
    ]
    pods = pod_figures(*readings)
    figures = document(pods, time="now", seconds=2.0, problems=[])
    assert figures["total"]["tokensPerSecond"]["memory"] == 30.0
    memory, remote = figures["tiers"]
    assert memory["name"] == "memory"
    assert (remote["queuedLoads"], remote["openCircuits"], remote["pods"]) == (9, 1, 3)
    assert remote["problem"] == "refused [2J"


def test_sidecar_that_is_not_ready_says_so():
    starting = {"is_ready": False, "not_ready_reason": "the arena is\nbusy"}
    [pod] = pod_figures([], [SidecarAnswer("1", "a", "", starting)])
    assert pod["problem"] == "the arena is busy"
