"""Sizes a remote tier by its number of shards, in a closed loop with exact tiers and constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_operator.policy.decide import FAST_HALF_LIFE, decide
from lmcache_operator.policy.state import Decision, State
from lmcache_operator.policy.tier import GIB, Service, remote_tier
from lmcache_operator.policy.traffic import Traffic
from lmcache_store.curves import Window
from testing.workloads import tiers
from testing.workloads.closed_loop import TICK, Loop, Moment, Run, Setup


@dataclass(frozen=True)
class RemoteSetup(Setup):
    """A service with a remote tier. ``start`` is the constant memory of a pod."""

    counts: tuple[int, ...] = tuple(range(1, 9))
    """Allowed numbers of shards."""
    start_count: int = 2
    shard_gib: float = 64.0
    load_bytes_per_second: float = 3e9
    refresh: float | None = None
    usable_share: float = 1.0
    """Share of a shard's memory that holds payload."""
    first_guess: float = 0.95
    """The autoscaler's assumption for that share before its first measurement."""

    @property
    def service(self) -> Service:
        return replace(super().service, load_bytes_per_second=self.load_bytes_per_second)

    @property
    def usd_per_row(self) -> float:
        """USD for a computed row."""
        return replace(self.service, load_bytes_per_second=0.0).usd_per_token(self.prices) * (
            self.workload.tokens_per_row
        )

    def cost(self, served: Sequence[tiers.Hits], gib: float) -> float:
        """USD per hour for computed rows, for loads in a tick, and for the shards."""
        computed = sum(hits.missed for hits in served) * self.usd_per_row
        loaded = sum(hits.remote for hits in served) * (self.usd_per_row - self.usd_per_miss)
        return (computed + loaded) * 3600 / TICK + gib * self.prices.shard_gib_hour

    def with_shards(self, count: int) -> float:
        """USD per hour with a constant number of shards."""
        pods = self.pods(count)
        served = (
            [pods.serve(pod, request.keys, request.time) for pod, request in batch]
            for _, batch in self.ticks()
        )
        costs = [self.cost(hits, count * self.shard_gib) for hits in served]
        return sum(costs) / len(costs)

    def pods(self, count: int) -> tiers.Service:
        rows = self.workload.rows
        rows_per_shard = rows(self.usable_share * self.shard_gib * GIB)
        remote = tiers.Shards(count, rows_per_shard, refresh=self.refresh)
        return tiers.Service(self.num_pods, rows(self.engine_gib * GIB), rows(self.start * GIB), remote)


class RemoteLoop(Loop):
    """Changes the number of shards while pods serve. ``Moment.size`` is the size of all shards."""

    def __init__(self, setup: RemoteSetup) -> None:
        super().__init__(setup)
        self.remote_setup = setup
        shards = (setup.counts[0] * setup.shard_gib, setup.counts[-1] * setup.shard_gib)
        self.traffic = Traffic("ns", min(setup.start, *shards) * GIB, max(shards) * GIB, max_keys=10**7)
        self.traffic.memory(0.0, setup.start * GIB, setup.service, State(usable=1.0))
        self.state = State(usable=setup.first_guess)
        self.pods = setup.pods(setup.start_count)
        self.size = setup.start_count * setup.shard_gib
        self.moved = Window(FAST_HALF_LIFE, 1.0, 2.0)
        self.num_moved = 0

    @property
    def remote(self) -> tiers.Shards:
        assert self.pods.remote is not None
        return self.pods.remote

    def _count(self, end: float, served: Sequence[tiers.Hits]) -> None:
        setup, rows, missed = self.remote_setup, sum(map(sum, served)), sum(hits.missed for hits in served)
        far = sum(hits.remote for hits in served)
        self.traffic.count(
            end - TICK / 2, TICK, rows, rows - missed - far, far, missed * setup.workload.row_bytes
        )
        self.moved.count(end, self.remote.num_moved - self.num_moved, seconds=TICK)
        self.num_moved = self.remote.num_moved
        hits = 1 - missed / rows if rows else 0.0
        self.moments.append(Moment(end / 3600, self.size, setup.cost(served, self.size), hits))

    def _resize(self, time: float) -> None:
        self.remote.resize(round(self.size / self.remote_setup.shard_gib), time)

    def _decided(self, time: float) -> Decision:
        setup = self.remote_setup
        moved = self.moved.accesses_per_hour / 3600 * setup.workload.row_bytes
        service = replace(setup.service, moved_bytes_per_second=moved)
        day = self.traffic.curve.shared_windows[0]
        hits = day.accesses_per_hour * day.measured_hits
        tier = remote_tier(setup.counts, setup.shard_gib * GIB, service, setup.prices, hits)
        measured = self.traffic.remote(time, self.size * GIB, self.state, setup.obstacle(time))
        decision, self.state = decide(tier, self.state, measured)
        return decision


def simulate_remote(setup: RemoteSetup) -> Run:
    """Run the autoscaler of the remote tier over a workload."""
    return RemoteLoop(setup).run()
