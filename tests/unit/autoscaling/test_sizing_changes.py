"""Chosen sizes until pods have them, or cannot have them."""

import json
from functools import cache

import pytest

from lmcache_operator.autoscaling.sizing import Situation, UnavailableSize
from lmcache_operator.policy.report import Choice
from lmcache_operator.policy.state import Obstacle
from lmcache_store.common.units import parse_quantity
from testing.workloads.requests import Request, Workload, chat
from tests.harness.operator.sizing_loop import AUTO, PODS, SIZE, START, Loop, talk


def test_choice_is_limited_by_the_maximum_of_running_pods():
    """The pods were created with a lower maximum, or by an earlier operator."""
    loop = Loop()
    loop.situation = loop.situation._replace(largest_in_place=80 << 30)
    loop.run(2.0)
    assert loop.sidecars.size_bytes == 80 << 30
    memory_reports = [report.status["memory"] for report in loop.reports]
    reasons = [memory["reason"] for memory in memory_reports if memory["limitedBy"] == "Max"]
    assert reasons
    assert all(text.endswith("; pods must be replaced to get more than 80Gi") for text in reasons)
    # An earlier choice above the new maximum must not delay decisions.
    loop.situation = loop.situation._replace(largest_in_place=72 << 30)
    loop.resize(72 << 30)
    loop.run(0.5, follow=False)
    assert "resizing pods" not in str(loop.memory_status()["reason"])
    # New pods have no such maximum.
    loop.situation = loop.situation._replace(largest_in_place=512 << 30)
    loop.run(2.4)
    assert loop.sidecars.size_bytes > 80 << 30


def chosen_loop(size: int, hours: int = 5) -> Loop:
    """A loop with two hours of traffic, and a size that was chosen just now."""
    loop = Loop(settings=AUTO._replace(is_memory_auto=False), workload=talk(hours))
    loop.run(2.0, follow=False)
    loop.situation = Situation(AUTO, PODS)
    loop.sizing._memory.chosen = Choice(size, SIZE)
    return loop


def test_narrowed_bounds_limit_the_choice():
    loop = chosen_loop(128 << 30)
    loop.situation = Situation(AUTO._replace(memory_bounds=(16 << 30, 80 << 30)), PODS)
    loop.resize(80 << 30)
    loop.run(0.5, follow=False)
    assert "resizing pods" not in str(loop.memory_status()["reason"])
    assert loop.report.memory.size <= 80 << 30


def test_size_that_pods_do_not_reach_in_30_minutes_is_dropped():
    """The node granted the memory, but pods have less: their volume is too small, or rows are in use."""
    loop = chosen_loop(128 << 30)
    loop.resize(100 << 30)
    loop.run(0.4, follow=False)
    assert "resizing pods: 0 of 2 pods have 128Gi" in loop.memory_status()["reason"]
    loop.run(0.5, follow=False)
    memory_reports = [report.status["memory"] for report in loop.reports if report.memory]
    (dropped,) = (memory for memory in memory_reports if memory["limitedBy"] == "Infeasible")
    assert dropped["reason"] == "0 of 2 pods have 128Gi; no other pod got it in 30 minutes"
    assert loop.report.memory == Choice(100 << 30, SIZE)


def test_choice_is_dropped_for_a_pod_that_fits_no_node():
    """A drained pod must start again, although its node lacks memory for the chosen size."""
    loop = chosen_loop(128 << 30, hours=12)
    loop.resize(128 << 30)
    why = "pod chat-engine-1: 0/2 nodes are available: 2 Insufficient memory."
    unplaced = UnavailableSize(128 << 30, why)
    pod_missing = Obstacle("Cooldown", "1 of 2 pods are ready and match the spec")
    loop.situation = loop.situation._replace(obstacle=pod_missing, num_shards=2)
    loop.run(0.5, follow=False)
    assert loop.report.memory == Choice(128 << 30, SIZE), "a node may still be added"
    loop.situation = loop.situation._replace(unplaced=(unplaced,))
    loop.poll()
    assert loop.report.memory is None, "it is dropped at once, not at the next decision after 15 minutes"
    assert loop.memory_status()["limitedBy"] == "Infeasible"
    reason = f"back to the declared 64Gi: no node had 128Gi of free memory for 10 minutes ({why})"
    assert loop.memory_status()["reason"] == reason
    # The pod runs with the declared size. For six hours no size that may not fit is chosen.
    loop.situation = loop.situation._replace(obstacle=None, unplaced=())
    loop.resize(SIZE)
    loop.run(5.0)
    assert loop.sidecars.size_bytes == SIZE
    loop.run(3.0)
    assert loop.sidecars.size_bytes > SIZE


def test_unplaced_pod_with_an_earlier_size_does_not_block():
    """The operator replaces the pod: its template has the smaller size."""
    loop = chosen_loop(128 << 30)
    loop.situation = loop.situation._replace(unplaced=(UnavailableSize(256 << 30, "no node"),))
    loop.run(0.3, follow=False)
    assert loop.report.memory is not None
    assert loop.memory_status()["limitedBy"] != "Infeasible"


def test_size_that_all_pods_have_is_not_infeasible():
    """A pod has shrunk, but cannot release the memory because its limit has a minimum."""
    loop = chosen_loop(SIZE)
    loop.situation = loop.situation._replace(refusals=(UnavailableSize(SIZE, "least memory"),))
    num_reports = len(loop.reports)
    loop.run(0.4, follow=False)
    assert loop.memory_status()["limitedBy"] != "Infeasible"
    assert len(loop.reports) - num_reports <= 2


def test_number_of_pods_is_averaged_over_the_day():
    """A day's lookups of few pods do not show whether many pods are too expensive, and vice versa."""
    loop = Loop()
    loop.run(2.0, follow=False)
    traffic = loop.sizing.intake.traffic
    assert traffic.num_pods == pytest.approx(2.0)
    state = json.loads(json.dumps(traffic.state()))
    restored = type(traffic)(traffic.namespace, *traffic.bounds)
    restored.restore(state)
    assert restored.num_pods == pytest.approx(2.0)
    for hour in range(4):
        traffic.count(loop.now + 3600 * (hour + 1), 3600.0, 1000.0, 0.0, num_pods=8)
    assert 2.5 < traffic.num_pods < 7.5


class SampledLoop(Loop):
    """A loop whose sidecars sample so many keys that 1,600 of them are in memory, or all keys."""

    def __init__(self, size: int) -> None:
        super().__init__(workload=dense_workload())
        self.settings = AUTO._replace(memory=size, is_memory_auto=False)
        self.situation = Situation(self.settings, PODS)
        self.resize(size)

    def resize(self, size: int) -> None:
        super().resize(size)
        for sidecar in self.sidecars.samplers:
            sidecar.sampler.rate = min(1.0, 1600 / self.workload.rows(size))


@cache
def dense_workload() -> Workload:
    """A chat workload with four times as many rows of a quarter of the size."""
    whole = chat(5, 0.2, scale=1)
    moved = [Request(each.time + START, each.session, each.keys) for each in whole.requests]
    return Workload(moved, whole.scale)


@pytest.mark.rotating
def test_shrunk_size_increases_the_sampling_rate_again():
    """A fifth of the keys is enough at 512Gi. At 64Gi it is not enough to distinguish sizes."""
    large, small = SampledLoop(512 << 30), SampledLoop(64 << 30)
    large.run(1.0)
    assert large.sizing.intake.traffic.curve.rate == pytest.approx(0.2, abs=0.01)
    large.resize(64 << 30)
    large.poll()
    before = large.memory_status()["keysInSize"]
    small.run(1.0)
    small.poll()
    for loop in (large, small):
        loop.run(2.0)
    assert (before, large.memory_status()["keysInSize"]) == (200, 1024)
    sizes = [float(parse_quantity(loop.memory_status()["recommended"])) for loop in (large, small)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
