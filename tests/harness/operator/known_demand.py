"""Demand with a known curve, and services and tiers whose sizes can be decided by hand."""

from dataclasses import dataclass, replace
from itertools import pairwise

from lmcache_operator.policy.state import Measurements, State
from lmcache_operator.policy.tier import GIB, Prices, Service, memory_tier
from lmcache_store.curves import Difference

HOUR = 3600.0
PRICES = Prices(gpu_hour=2.50, memory_gib_hour=0.004, shard_gib_hour=0.004)
SMALL = Service(
    num_pods=2, gpus=1, prefill_tokens_per_second=10_000, kv_bytes_per_token=128 << 10, tokens_per_access=512
)
LARGE = Service(
    num_pods=2, gpus=4, prefill_tokens_per_second=8_000, kv_bytes_per_token=320 << 10, tokens_per_access=512
)


@dataclass
class KnownDemand:
    """Demand with a known curve: points (GiB, hit ratio) with straight lines between them."""

    curve: list[tuple[float, float]]
    tokens_per_hour: float = 43.2e6
    measured_hits: float = 0.4
    error: float = 0.0
    num_accesses: float = 1e6

    @property
    def accesses_per_hour(self) -> float:
        return self.tokens_per_hour / 512

    def hits(self, size: float) -> float:
        gib = size / GIB
        for (below, low), (above, high) in pairwise([(0.0, 0.0), *self.curve]):
            if gib <= above:
                return low + (high - low) * (gib - below) / (above - below)
        return self.curve[-1][1]

    def between(self, smaller: float, larger: float) -> Difference:
        return Difference(self.hits(larger) - self.hits(smaller), self.error)


def measurements(
    demand: KnownDemand, gib: float = 64.0, time: float = 10 * HOUR, **overrides: object
) -> Measurements:
    values = {
        "time": time, "namespace": "ns", "size": gib * GIB, "fast": demand, "day": demand,
        "settled": replace(demand, num_accesses=0),  # no accesses that could judge a step
        "new_bytes": 1e15, "miss_bytes_per_second": 1e9,
    }  # fmt: skip
    return Measurements(**{**values, **overrides})


SETTLED = State(namespace="ns", time=0.0, size=64 * GIB, usable=1.0, shrinks_since=0.0)
"""A long-running, fully usable tier without recent changes, so that figures equal those by hand."""


def tier(service: Service = SMALL, lowest: float = 64):
    """A tier that has only two sizes, by default 64 and 96 GiB."""
    sizes = lowest * GIB, 96 * GIB
    return replace(memory_tier(*sizes, service, PRICES), sizes=sizes)


BY_HAND = KnownDemand([(32, 0.30), (64, 0.40), (96, 0.46)])
STEEP = KnownDemand([(64, 0.2), (512, 0.9)], tokens_per_hour=400e6, measured_hits=0.2)
FLAT = KnownDemand([(16, 0.4), (512, 0.4)])
WIDE = memory_tier(16 * GIB, 512 * GIB, SMALL, PRICES)
