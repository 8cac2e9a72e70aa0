"""The number of shards, from what pods say: they, and pods' memory, are sized by turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from lmcache_operator.autoscaling.report import Choice
from lmcache_operator.autoscaling.state import Obstacle, Step
from lmcache_operator.autoscaling.tier import GIB, Prices
from lmcache_operator.scaling.sizing import Refused, Settings, Situation, Sizing

from lmcache.units import format_size
from testing.workloads.closed_loop import Routing, scattered, sticky
from testing.workloads.remote_loop import RemoteSetup
from testing.workloads.requests import Request, Workload, chat
from testing.workloads.tiers import Service, Shards
from tests.harness.sizing_loop import START, Loop

MEMORY, SHARD = 32 << 30, 64 << 30
PODS = {f"uid-{number}": f"pod-{number}" for number in range(4)}
SETTINGS = Settings(
    MEMORY, (8 << 30, 128 << 30), Prices(2.5, 0.004, 0.004),
    shards=2, shard_bounds=(1, 8), shard_bytes=SHARD, are_shards_auto=True,
)  # fmt: skip


@cache
def talk() -> Workload:
    found = chat(12, 0.4, scale=16)
    moved = [Request(one.time + START, one.session, one.keys) for one in found.requests]
    return Workload(moved, found.scale)


class ShardLoop(Loop):
    """Four pods, and shards; a change of their number takes a quarter of an hour."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(settings=SETTINGS._replace(shards=num_shards), workload=talk())
        rows = self.workload.rows
        self.pods = Service(4, 0, rows(MEMORY), Shards(num_shards, rows(SHARD)))
        self.sidecars = type(self.sidecars)(self.workload, self.pods, 4, MEMORY)
        self.route = scattered(4)
        self.situation = Situation(self.settings, PODS, num_shards=num_shards)
        self.changes: list[int] = []
        self.until = 0.0

    def poll(self) -> None:
        super().poll()
        assert self.report
        wanted = self.report.shards.size if self.report.shards else self.situation.num_shards
        if wanted != self.situation.num_shards and self.now >= self.until:
            self.pods.remote.resize(wanted, self.now)
            self.changes.append(wanted)
            self.until = self.now + Shards.TRANSITION
            self.situation = self.situation._replace(num_shards=wanted)
        busy = Obstacle("Cooldown", "a change of the shards is under way")
        self.situation = self.situation._replace(shards_obstacle=busy if self.now < self.until else None)


def constant(
    count: int, memory: int = MEMORY, load_bytes_per_second: float = 3e9,
    route: Callable[[int], Routing] = scattered,
) -> float:  # fmt: skip
    """USD per hour with so many shards, and so much memory, all the time."""
    setup = RemoteSetup(
        chat(12, 0.4, scale=16), num_pods=4, route=route, start=memory / GIB,
        load_bytes_per_second=load_bytes_per_second,
    )  # fmt: skip
    return setup.with_shards(count) + setup.usd_per_gib_hour * setup.start


def test_what_pods_say_brings_the_best_number_of_shards():
    loop = ShardLoop(2)
    loop.run(10.0, follow=False)
    assert loop.report.shards == Choice(loop.changes[-1], 2)
    assert constant(loop.changes[-1]) <= 1.03 * min(map(constant, range(2, 7)))
    assert len(loop.changes) <= 4
    told = loop.report.status["remote"]
    assert (told["current"], bool(told["curve"])) == (loop.changes[-1], True)
    # What was measured behind the pods' memory is what the curve says of these shards.
    day = loop.sizing.intake.traffic.curve.shared_windows[0]
    said = day.hit_ratio(0.95 * loop.changes[-1] * SHARD).hit_ratio
    assert abs(said - day.measured_hits) < 0.05


def test_both_tiers_together_come_close_to_the_best_pair():
    """What memory hits more, the shards would have had, and soon: it is worth only the time to load it."""
    loop = ShardLoop(2)
    loop.sidecars.load_bytes_per_second = rate = 12e9
    loop.settings = loop.settings._replace(is_memory_auto=True)
    loop.situation = loop.situation._replace(settings=loop.settings)
    loop.run(11.0)
    memory, count = loop.sidecars.size_bytes, loop.situation.num_shards
    pairs = [(size << 30, number) for size in (8, 16, 32) for number in (4, 6, 8)]
    best = min(constant(number, size, rate) for size, number in pairs)
    assert constant(count, memory, rate) <= 1.03 * best
    assert loop.report.status["memory"]["current"] == format_size(memory)
    assert len(loop.changes) <= 6


def test_memory_that_costs_nothing_grows_before_shards_that_cost_much():
    """Shards are judged beside the memory that pods have in the end."""
    loop = ShardLoop(2)
    free = loop.settings._replace(
        is_memory_auto=True, memory_bounds=(8 << 30, 128 << 30), prices=Prices(2.5, 0.0, 0.004),
        shard_bounds=(1, 16),
    )  # fmt: skip
    loop.settings, loop.situation = free, loop.situation._replace(settings=free)
    loop.run(4.0)
    assert loop.sidecars.size_bytes == 128 << 30
    loop.run(7.0)
    count = loop.situation.num_shards
    assert constant_of_shards(count) <= 1.05 * min(map(constant_of_shards, (1, 2, 4, 8)))
    assert len(loop.changes) <= 6


@cache
def constant_of_shards(count: int) -> float:
    """USD per hour beside 128 GiB of memory that cost nothing."""
    workload, free = chat(12, 0.4, scale=16), Prices(2.5, 0.0, 0.004)
    return RemoteSetup(workload, num_pods=4, route=scattered, start=128.0, prices=free).with_shards(count)


def test_memory_that_is_refused_holds_no_shards_up():
    """Nor does a shard on its way go back because a node has no room for memory."""
    loop = ShardLoop(2)
    loop.settings = loop.settings._replace(is_memory_auto=True)
    loop.situation = loop.situation._replace(settings=loop.settings)
    loop.run(1.0, follow=False)
    loop.sizing._memory.chosen = Choice(2 * MEMORY, MEMORY)
    refused = Refused(2 * MEMORY, "pod x: its node has no room")
    status = loop.sizing.decide(loop.now, loop.situation._replace(refusals=(refused,))).status
    assert (status["memory"]["limitedBy"], status["memory"]["reason"]) == ("Infeasible", refused.reason)
    assert status["remote"]["limitedBy"] != "Infeasible"


@pytest.mark.parametrize("num_shards", [4, 8])
def test_memory_gives_up_what_shards_hold_already(num_shards):
    """However large it is: of what twice as much would hit, or half as much would not, they have all, though
    they have not half of what it misses. What they have at this size tells, not what they had at others."""
    loop = ShardLoop(num_shards)
    loop.route = sticky(4)
    loop.sidecars.load_bytes_per_second = rate = 12e9
    loop.settings = loop.settings._replace(
        memory=64 << 30, is_memory_auto=True, are_shards_auto=False
    )  # fmt: skip
    loop.situation = loop.situation._replace(settings=loop.settings)
    loop.resize(64 << 30)
    loop.run(11.5)
    best = min(constant(num_shards, size << 30, rate, sticky) for size in (8, 16, 64))
    assert constant(num_shards, loop.sidecars.size_bytes, rate, sticky) <= 1.05 * best


def test_while_one_tier_is_judged_the_other_waits():
    loop = ShardLoop(2)
    loop.settings = loop.settings._replace(is_memory_auto=True)
    loop.situation = loop.situation._replace(settings=loop.settings)
    loop.run(1.0, follow=False)
    sizing: Sizing = loop.sizing

    def reasons(pending: str) -> tuple[str, str]:
        for name in ("_memory", "_remote"):
            own = getattr(sizing, name)
            pair = Step(own.state.size / 2, own.state.size) if name == pending else None
            own.state = type(own.state)(**{**vars(own.state), "pending": pair, "due": loop.now + 9e9})
        status = sizing.decide(loop.now, loop.situation).status
        return status["memory"]["reason"], status["remote"]["reason"]

    assert reasons("_memory")[1] == "the size of pods' memory has just changed"
    assert reasons("_remote")[0] == "the number of shards has just changed"
    # Memory that costs nothing can lose nothing. It grows first.
    loop.situation = loop.situation._replace(settings=loop.settings._replace(prices=Prices(2.5, 0.0, 0.004)))
    assert reasons("_remote")[0] != "the number of shards has just changed"
    assert reasons("_memory")[1] == "the size of pods' memory has just changed"
