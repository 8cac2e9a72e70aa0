"""A size that was chosen, until pods have it, or can not have it."""

from __future__ import annotations

import json
from functools import cache

import pytest
from lmcache_operator.autoscaling.report import Choice
from lmcache_operator.autoscaling.state import Obstacle
from lmcache_operator.scaling.sizing import Refused, Situation

from lmcache.units import parse_quantity
from testing.workloads.requests import Request, Workload, chat
from tests.harness.sizing_loop import AUTO, PODS, SIZE, START, Loop, talk


def test_no_size_is_chosen_that_running_pods_can_not_have():
    """Those that were made with a lower bound, or by an earlier operator."""
    loop = Loop()
    loop.situation = loop.situation._replace(reach=80 << 30)
    loop.run(2.0)
    assert loop.sidecars.size_bytes == 80 << 30
    told = [report.status["memory"] for report in loop.reports]
    reasons = [memory["reason"] for memory in told if memory["limitedBy"] == "Max"]
    assert reasons
    assert all(text.endswith("; more than 80Gi takes a pod that is made anew") for text in reasons)
    # A size that was chosen when they could have it is no change that is waited for.
    loop.situation = loop.situation._replace(reach=72 << 30)
    loop.resize(72 << 30)
    loop.run(0.5, follow=False)
    assert "under way" not in str(loop.told()["reason"])
    # Pods that are made anew have no such bound.
    loop.situation = loop.situation._replace(reach=512 << 30)
    loop.run(2.4)
    assert loop.sidecars.size_bytes > 80 << 30


def chosen_loop(size: int, hours: int = 5) -> Loop:
    """Two hours of traffic, and a size that was chosen a moment ago."""
    loop = Loop(settings=AUTO._replace(is_memory_auto=False), workload=talk(hours))
    loop.run(2.0, follow=False)
    loop.situation = Situation(AUTO, PODS)
    loop.sizing._memory.chosen = Choice(size, SIZE)
    return loop


def test_bounds_that_are_narrowed_hold_for_what_was_chosen():
    loop = chosen_loop(128 << 30)
    loop.situation = Situation(AUTO._replace(memory_bounds=(16 << 30, 80 << 30)), PODS)
    loop.resize(80 << 30)
    loop.run(0.5, follow=False)
    assert "under way" not in str(loop.told()["reason"])
    assert loop.report.memory.size <= 80 << 30


def test_a_size_that_pods_do_not_reach_is_given_up():
    """The node gave the memory, and yet they have less: their volume is smaller, or somebody holds rows."""
    loop = chosen_loop(128 << 30)
    loop.resize(100 << 30)
    loop.run(0.4, follow=False)
    assert "under way: 0 of 2 pods have 128Gi" in loop.told()["reason"]
    loop.run(0.5, follow=False)
    told = [report.status["memory"] for report in loop.reports if report.memory]
    (given_up,) = (memory for memory in told if memory["limitedBy"] == "Infeasible")
    assert given_up["reason"] == "0 of 2 pods have 128Gi, and for 30 minutes not one more"
    assert loop.report.memory == Choice(100 << 30, SIZE)


def test_a_pod_that_finds_no_node_with_the_size_gets_the_declared_one():
    """A drained pod must start again, although its node lacks the memory that was chosen for the cache."""
    loop = chosen_loop(128 << 30, hours=12)
    loop.resize(128 << 30)
    unplaced = Refused(128 << 30, "pod chat-engine-1: 0/2 nodes are available: 2 Insufficient memory.")
    away = Obstacle("Cooldown", "1 of 2 pods are ready and as declared")
    loop.situation = loop.situation._replace(obstacle=away, num_shards=2)
    loop.run(0.5, follow=False)
    assert loop.report.memory == Choice(128 << 30, SIZE), "a node may still be added"
    loop.situation = loop.situation._replace(unplaced=(unplaced,))
    loop.poll()
    assert loop.report.memory is None, "at once, not at the next of 15 minutes"
    assert loop.told()["limitedBy"] == "Infeasible"
    assert loop.told()["reason"] == (
        "back to the declared 64Gi: 128Gi of memory found no node for 10 minutes "
        "(pod chat-engine-1: 0/2 nodes are available: 2 Insufficient memory.)"
    )
    # The pod runs with the declared size. A size that may not fit either is not chosen for six hours.
    loop.situation = loop.situation._replace(obstacle=None, unplaced=())
    loop.resize(SIZE)
    loop.run(5.0)
    assert loop.sidecars.size_bytes == SIZE
    loop.run(3.0)
    assert loop.sidecars.size_bytes > SIZE


def test_a_pod_that_finds_no_node_with_a_size_of_before_holds_nothing_up():
    """The operator replaces the pod: its template has the smaller size."""
    loop = chosen_loop(128 << 30)
    loop.situation = loop.situation._replace(unplaced=(Refused(256 << 30, "no node"),))
    loop.run(0.3, follow=False)
    assert loop.report.memory is not None
    assert loop.told()["limitedBy"] != "Infeasible"


def test_a_size_that_all_have_is_not_refused():
    """A pod has shrunk, and can't give back the memory: a limit has a least value there."""
    loop = chosen_loop(SIZE)
    loop.situation = loop.situation._replace(refusals=(Refused(SIZE, "least memory"),))
    number = len(loop.reports)
    loop.run(0.4, follow=False)
    assert loop.told()["limitedBy"] != "Infeasible"
    assert len(loop.reports) - number <= 2


def test_memory_is_paid_for_as_many_pods_as_there_were():
    """A day's lookups of few pods say nothing of whether many are too dear, and the other way round."""
    loop = Loop()
    loop.run(2.0, follow=False)
    alone = loop.sizing.intake.traffic
    assert alone.num_pods == pytest.approx(2.0)
    state = json.loads(json.dumps(alone.state()))
    other = type(alone)(alone.namespace, *alone.bounds, is_shared=True)
    other.restore(state)
    assert other.num_pods == pytest.approx(2.0)
    for hour in range(4):
        alone.count(loop.now + 3600 * (hour + 1), 3600.0, 1000.0, 0.0, num_pods=8)
    assert 2.5 < alone.num_pods < 7.5


class Sampled(Loop):
    """Sidecars keep as many keys as let 1,600 of them be in memory, or all."""

    def __init__(self, size: int) -> None:
        super().__init__(workload=dense())
        self.settings = AUTO._replace(memory=size, is_memory_auto=False)
        self.situation = Situation(self.settings, PODS)
        self.resize(size)

    def resize(self, size: int) -> None:
        super().resize(size)
        for told in self.sidecars.told:
            told.sampler.rate = min(1.0, 1600 / self.workload.rows(size))


@cache
def dense() -> Workload:
    """With four times as many rows of a quarter."""
    found = chat(5, 0.2, scale=1)
    moved = [Request(one.time + START, one.session, one.keys) for one in found.requests]
    return Workload(moved, found.scale)


def test_a_size_that_comes_down_brings_the_keys_back():
    """Of 512Gi a fifth of the keys was enough; of 64Gi that is too little to tell sizes apart."""
    large, always = Sampled(512 << 30), Sampled(64 << 30)
    large.run(1.0)
    assert large.sizing.intake.traffic.curve.rate == pytest.approx(0.2, abs=0.01)
    large.resize(64 << 30)
    large.poll()
    before = large.told()["keysInSize"]
    always.run(1.0)
    always.poll()
    for loop in (large, always):
        loop.run(2.0)
    assert (before, large.told()["keysInSize"]) == (200, 1024)
    sizes = [float(parse_quantity(loop.told()["recommended"])) for loop in (large, always)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
