"""The number of shards from pods' samples. Shards and pods' memory are sized in turns."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lmcache_operator.autoscaling.sizing import Situation, Sizing, SizingSettings, UnavailableSize
from lmcache_operator.policy.report import Choice
from lmcache_operator.policy.state import Obstacle, Step
from lmcache_operator.policy.tier import GIB, Prices
from lmcache_store.common.units import format_size, parse_size
from testing.workloads.closed_loop import Routing, scattered, sticky
from testing.workloads.remote_loop import RemoteSetup
from testing.workloads.requests import Request, Workload, chat
from testing.workloads.tiers import Service, Shards
from tests.harness.operator.sizing_loop import START, Loop

MEMORY, SHARD = 32 << 30, 64 << 30
PODS = {f"uid-{number}": f"pod-{number}" for number in range(4)}
SETTINGS = SizingSettings(
    MEMORY, (8 << 30, 128 << 30), Prices(2.5, 0.004, 0.004),
    shards=2, shard_bounds=(1, 8), shard_bytes=SHARD, are_shards_auto=True,
)  # fmt: skip


@cache
def chat_workload() -> Workload:
    workload = chat(12, 0.4, scale=16)
    moved = [Request(request.time + START, request.session, request.keys) for request in workload.requests]
    return Workload(moved, workload.scale)


class ShardLoop(Loop):
    """A loop with four pods and with shards, whose number takes a quarter of an hour to change."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(settings=SETTINGS._replace(shards=num_shards), workload=chat_workload())
        rows = self.workload.rows
        self.pods = Service(4, 0, rows(MEMORY), Shards(num_shards, rows(SHARD)))
        self.sidecars = type(self.sidecars)(self.workload, self.pods, 4, MEMORY)
        self.route = scattered(4)
        self.situation = Situation(self.settings, PODS, num_shards=num_shards)
        self.changes: list[int] = []
        self.changing_until = 0.0

    def declare(self, **changes: Any) -> None:
        self.settings = self.settings._replace(**changes)
        self.situation = self.situation._replace(settings=self.settings)

    def poll(self) -> None:
        super().poll()
        assert self.report
        num_wanted = self.report.shards.size if self.report.shards else self.situation.num_shards
        if num_wanted != self.situation.num_shards and self.now >= self.changing_until:
            self.pods.remote.resize(num_wanted, self.now)
            self.changes.append(num_wanted)
            self.changing_until = self.now + Shards.TRANSITION
            self.situation = self.situation._replace(num_shards=num_wanted)
        changing = Obstacle("Cooldown", "a change of the shards is in progress")
        obstacle = changing if self.now < self.changing_until else None
        self.situation = self.situation._replace(shards_obstacle=obstacle)


@cache
def constant(
    count: int, memory: int = MEMORY, load_bytes_per_second: float = 3e9,
    route: Callable[[int], Routing] = scattered,
) -> float:  # fmt: skip
    """Cost in USD per hour with a constant number of shards and memory size."""
    setup = RemoteSetup(
        chat(12, 0.4, scale=16), num_pods=4, route=route, start=memory / GIB,
        load_bytes_per_second=load_bytes_per_second,
    )  # fmt: skip
    return setup.with_shards(count) + setup.usd_per_gib_hour * setup.start


@pytest.mark.rotating
def test_samples_lead_to_the_best_number_of_shards():
    loop = ShardLoop(2)
    loop.run(10.0, follow=False)
    assert loop.report.shards == Choice(loop.changes[-1], 2)
    assert constant(loop.changes[-1]) <= 1.03 * min(map(constant, range(2, 7)))
    assert len(loop.changes) <= 4
    remote_status = loop.report.status["remote"]
    assert (remote_status["current"], bool(remote_status["curve"])) == (loop.changes[-1], True)
    # The measured hits of shards equal the curve's hits at this number of shards.
    day = loop.sizing.intake.traffic.curve.shared_windows[0]
    predicted_hits = day.hit_ratio(0.95 * loop.changes[-1] * SHARD).hit_ratio
    assert abs(predicted_hits - day.measured_hits) < 0.05


def test_curve_of_shards_has_their_bytes_if_a_shard_has_the_rows_of_several_parts():
    loop = ShardLoop(2)
    loop.declare(num_parts=2, shard_bytes=SHARD // 2)
    loop.run(1.0, follow=False)
    sizes = [parse_size(point["size"]) for point in loop.report.status["remote"]["curve"]]
    assert max(sizes) == loop.settings.shard_bounds[1] * SHARD


@pytest.mark.rotating
def test_memory_and_shards_together_reach_the_best_sizes():
    """Shards already have the additional hits of memory, so memory saves only their loading time."""
    loop = ShardLoop(2)
    loop.sidecars.load_bytes_per_second = rate = 12e9
    loop.declare(is_memory_auto=True)
    loop.run(11.0)
    memory, count = loop.sidecars.size_bytes, loop.situation.num_shards
    pairs = [(size << 30, number) for size in (8, 16, 32) for number in (4, 6, 8)]
    best = min(constant(number, size, rate) for size, number in pairs)
    assert constant(count, memory, rate) <= 1.03 * best
    assert loop.report.status["memory"]["current"] == format_size(memory)
    assert len(loop.changes) <= 6


@pytest.mark.rotating
def test_memory_without_a_price_grows_before_shards():
    """Shards are judged with the final memory size of pods."""
    loop = ShardLoop(2)
    bounds = {"memory_bounds": (8 << 30, 128 << 30), "shard_bounds": (1, 16)}
    loop.declare(is_memory_auto=True, prices=Prices(2.5, 0.0, 0.004), **bounds)
    loop.run(4.0)
    assert loop.sidecars.size_bytes == 128 << 30
    loop.run(7.0)
    count = loop.situation.num_shards
    assert constant_of_shards(count) <= 1.05 * min(map(constant_of_shards, (1, 2, 4, 8)))
    assert len(loop.changes) <= 6


@cache
def constant_of_shards(count: int) -> float:
    """Cost in USD per hour with 128 GiB of free memory per pod."""
    free = {"start": 128.0, "prices": Prices(2.5, 0.0, 0.004)}
    return RemoteSetup(chat(12, 0.4, scale=16), num_pods=4, route=scattered, **free).with_shards(count)


def test_infeasible_memory_size_does_not_block_shards():
    """A node without free memory must not revert a change of shards either."""
    loop = ShardLoop(2)
    loop.declare(is_memory_auto=True)
    loop.run(1.0, follow=False)
    loop.sizing._memory.chosen = Choice(2 * MEMORY, MEMORY)
    unavailable = UnavailableSize(2 * MEMORY, "pod x: its node has no free memory")
    status = loop.sizing.decide(loop.now, loop.situation._replace(refusals=(unavailable,))).status
    assert (status["memory"]["limitedBy"], status["memory"]["reason"]) == ("Infeasible", unavailable.reason)
    assert status["remote"]["limitedBy"] != "Infeasible"


@pytest.mark.rotating
@pytest.mark.parametrize("num_shards", [4, 8])
def test_memory_shrinks_if_shards_have_the_same_rows(num_shards):
    """Shards have all rows that twice the memory would hit, or half the memory would miss.

    They have less than half of all misses. The decision uses their hits at the current size only.
    """
    loop = ShardLoop(num_shards)
    loop.route = sticky(4)
    loop.sidecars.load_bytes_per_second = rate = 12e9
    loop.declare(memory=64 << 30, is_memory_auto=True, are_shards_auto=False)
    loop.resize(64 << 30)
    loop.run(11.5)
    best = min(constant(num_shards, size << 30, rate, sticky) for size in (8, 16, 64))
    assert constant(num_shards, loop.sidecars.size_bytes, rate, sticky) <= 1.05 * best


def test_tier_waits_while_the_other_tier_is_judged():
    loop = ShardLoop(2)
    loop.declare(is_memory_auto=True)
    loop.run(1.0, follow=False)
    sizing: Sizing = loop.sizing

    def reasons(pending: str) -> tuple[str, str]:
        for name in ("_memory", "_remote"):
            tier_sizing = getattr(sizing, name)
            pair = Step(tier_sizing.state.size / 2, tier_sizing.state.size) if name == pending else None
            tier_sizing.state = type(tier_sizing.state)(
                **{**vars(tier_sizing.state), "pending": pair, "due": loop.now + 9e9}
            )
        status = sizing.decide(loop.now, loop.situation).status
        return status["memory"]["reason"], status["remote"]["reason"]

    assert reasons("_memory")[1] == "the size of pods' memory has just changed"
    assert reasons("_remote")[0] == "the number of shards has just changed"
    # Growth of memory without a price has no risk. Memory grows first.
    loop.declare(prices=Prices(2.5, 0.0, 0.004))
    assert reasons("_remote")[0] != "the number of shards has just changed"
    assert reasons("_memory")[1] == "the size of pods' memory has just changed"
