"""Autoscalers in a closed loop with exact tiers: their decisions change later hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from lmcache_operator.policy.decide import DECIDE_SECONDS, decide
from lmcache_operator.policy.state import Decision, Obstacle, State
from lmcache_operator.policy.tier import GIB, Prices, Service, Tier, memory_tier
from lmcache_operator.policy.traffic import Traffic
from lmcache_store.curves import HASHES, Lookup, MissRatioCurve
from testing.workloads import tiers
from testing.workloads.requests import KV_BYTES_PER_TOKEN, Request, Workload, row_hash

Routing = Callable[[Request], int]
"""The pod that serves a request."""

TICK = 300.0


def sticky(num_pods: int) -> Routing:
    """Route all requests of a session to one pod."""
    return lambda request: row_hash(8, request.session) % num_pods


def scattered(num_pods: int) -> Routing:
    """Route each request to a random pod."""
    rng = random.Random(0)
    return lambda request: rng.randrange(num_pods)


@dataclass(frozen=True)
class Setup:
    """A service with memory tiers to be sized."""

    workload: Workload
    num_pods: int = 2
    route: Callable[[int], Routing] = sticky
    engine_gib: float = 0.0
    bounds: tuple[float, float] = (16.0, 512.0)
    start: float = 64.0
    """Initial GiB of one pod."""
    prices: Prices = field(
        default_factory=lambda: Prices(gpu_hour=2.50, memory_gib_hour=0.004, shard_gib_hour=0.004)
    )
    usable: Callable[[float], float] = lambda gib: gib
    """Usable GiB of a size."""
    rate: float = 1.0
    obstacle: Callable[[float], Obstacle | None] = lambda time: None

    @property
    def service(self) -> Service:
        return Service(
            num_pods=self.num_pods, gpus=1, prefill_tokens_per_second=10_000.0,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN, tokens_per_access=self.workload.tokens_per_row,
            engine_cache_bytes=self.engine_gib * GIB,
        )  # fmt: skip

    @property
    def tier(self) -> Tier:
        lowest, highest = self.bounds
        return memory_tier(lowest * GIB, highest * GIB, self.service, self.prices)

    @property
    def usd_per_miss(self) -> float:
        return self.service.usd_per_token(self.prices) * self.workload.tokens_per_row

    @property
    def usd_per_gib_hour(self) -> float:
        return self.num_pods * self.prices.memory_gib_hour

    def ticks(self) -> Iterator[tuple[float, list[tuple[int, Request]]]]:
        """Requests with their pods, in ticks, and the end of each tick."""
        route = self.route(self.num_pods)
        end = TICK
        batch: list[tuple[int, Request]] = []
        for request in self.workload.requests:
            while request.time >= end:
                yield end, batch
                end, batch = end + TICK, []
            batch.append((route(request), request))
        yield end, batch

    def constant_hits(self) -> Callable[[float], float]:
        """Return a function: the share of all rows that hit with a constant size (GiB)."""
        smallest = min(self.bounds[0], self.engine_gib or self.bounds[0])
        curve = MissRatioCurve(
            10**7, smallest_bytes=0.45 * smallest * GIB, largest_bytes=2 * self.bounds[1] * GIB
        )
        for _, batch in self.ticks():
            curve.feed(lookups(self.workload, batch))
        return lambda gib: curve.hit_ratio(max(gib, self.engine_gib) * GIB).hit_ratio

    def constant(self) -> Callable[[float], float]:
        """Return a function: the cost of a constant size (GiB), in USD per hour."""
        return self.cost_of(self.constant_hits())

    def cost_of(self, hits: Callable[[float], float]) -> Callable[[float], float]:
        """Return a function: the cost of a size in USD per hour, from the share of rows that hit."""
        usd = self.rows_per_hour * self.usd_per_miss
        return lambda gib: (1 - hits(gib)) * usd + gib * self.usd_per_gib_hour

    @property
    def rows_per_hour(self) -> float:
        """Rows that all pods look up in an hour."""
        return sum(len(request.keys) for request in self.workload.requests) / self.workload.hours

    def sizes(self) -> list[float]:
        """Sizes (GiB) within the bounds, a sixteenth of an octave apart."""
        lowest, highest = self.bounds
        return [size for i in range(400) if (size := lowest * 2 ** (i / 16)) < highest] + [highest]

    def best_constant(self) -> tuple[float, float]:
        """The size (GiB) with the lowest cost, and its cost in USD per hour."""
        cost = self.constant()
        best = min(self.sizes(), key=cost)
        return best, cost(best)


def lookups(workload: Workload, batch: Sequence[tuple[int, Request]], rate: float = 1.0) -> Iterator[Lookup]:
    """Lookups like those of samplers: the head of each request, and keys under a threshold."""
    for pod, request in batch:
        keys = request.keys[::-1]
        if rate < 1:
            keys = tuple(key for key in keys if key < rate * HASHES or key == request.keys[0])
        yield Lookup(request.time, keys, int(workload.row_bytes), pod)


class Moment(NamedTuple):
    """One tick of a run."""

    hour: float
    size: float
    """GiB of one pod."""
    usd_per_hour: float
    hits: float
    """Share of rows that hit in the engine or in memory."""


@dataclass
class Run:
    """Result of a run."""

    moments: list[Moment]
    decisions: list[tuple[float, Decision]]
    """Decisions with their hours."""
    state: State
    surprises: list[float]
    """Difference between measured and predicted hits at each decision, as a share of accesses."""

    @cached_property
    def resizes(self) -> list[tuple[float, float]]:
        """(hour, GiB) of each change."""
        sizes = [(moment.hour, moment.size) for moment in self.moments]
        return [after for before, after in pairwise(sizes) if after[1] != before[1]]

    @property
    def usd_per_hour(self) -> float:
        return sum(moment.usd_per_hour for moment in self.moments) / len(self.moments)

    def size_at(self, hour: float) -> float:
        return next(moment.size for moment in self.moments if moment.hour >= hour)

    def sizes_after(self, hour: float) -> list[float]:
        return [moment.size for moment in self.moments if moment.hour >= hour]


class Loop:
    """Sizes the memory of all pods while they serve."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        lowest, highest = setup.bounds
        self.traffic = Traffic(
            "ns", min(lowest, setup.engine_gib or lowest) * GIB, highest * GIB,
            rate=setup.rate, max_keys=10**7,
        )  # fmt: skip
        self.size = setup.start
        self.pods = tiers.Service(setup.num_pods, setup.workload.rows(setup.engine_gib * GIB), self._rows())
        self.state = State()
        self.tier = setup.tier
        self.decisions: list[tuple[float, Decision]] = []
        self.moments: list[Moment] = []
        self.surprises: list[float] = []

    def _rows(self) -> int:
        return self.setup.workload.rows(self.setup.usable(self.size) * GIB)

    def run(self) -> Run:
        for end, batch in self.setup.ticks():
            served = [self.pods.serve(pod, request.keys, request.time) for pod, request in batch]
            self.traffic.curve.feed(lookups(self.setup.workload, batch, self.setup.rate))
            self._count(end, served)
            if end % DECIDE_SECONDS == 0:
                self._decide(end)
        return Run(self.moments, self.decisions, self.state, self.surprises)

    def _count(self, end: float, served: Sequence[tiers.Hits]) -> None:
        rows, missed = sum(map(sum, served)), sum(hits.missed for hits in served)
        filled = missed * self.setup.workload.row_bytes
        self.traffic.count(end - TICK / 2, TICK, rows, rows - missed, miss_bytes=filled)
        cost = missed * self.setup.usd_per_miss * 3600 / TICK + self.size * self.setup.usd_per_gib_hour
        self.moments.append(Moment(end / 3600, self.size, cost, 1 - missed / rows if rows else 0.0))

    def _decide(self, time: float) -> None:
        decision = self._decided(time)
        self.decisions.append((time / 3600, decision))
        if decision.next != decision.size:
            self.size = decision.next / GIB
            self._resize(time)
            self._decided(time)  # the autoscaler learns the new size as soon as all pods report it

    def _resize(self, time: float) -> None:
        self.pods.resize(self._rows())

    def _decided(self, time: float) -> Decision:
        obstacle = self.setup.obstacle(time)
        measured = self.traffic.memory(time, self.size * GIB, self.setup.service, self.state, obstacle)
        if measured.settled.num_accesses > 1000:
            size = self.tier.effective(measured.size, self.state.usable)
            predicted = measured.settled.between(0.0, size).share
            self.surprises.append(abs(measured.settled.measured_hits - predicted))
        decision, self.state = decide(self.tier, self.state, measured)
        return decision


def simulate(setup: Setup) -> Run:
    """Run the memory autoscaler over a workload."""
    return Loop(setup).run()
