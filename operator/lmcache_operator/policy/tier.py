"""Savings and costs of the sizes of one tier, in USD per hour. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lmcache_store.common.prices import GIB as GIB
from lmcache_store.common.prices import Prices as Prices
from lmcache_store.common.units import format_size
from lmcache_store.curves import Window

BYTES_PER_SECOND_OF_A_SHARD = 1e9
"""Planned traffic of one shard: half of the measured rate of one connection."""

_MAX_LOAD_TIME = 0.8  # as a share of the time to compute a token: slower loads are not even tried
_STEP_UP, _STEP_DOWN = 2.0, 1 / 1.5
_SIMILAR = 0.4  # octaves: 0 made 9 changes instead of 5 in a day-and-night load, and cost 0.3 % more
_PER_OCTAVE = 8  # candidate sizes: with 4, the worst case cost 21 % instead of 12 %
_ROUND = 32  # parts of an octave to round to: 108Gi, not 107.63Gi


LimitedBy = Literal[
    "None", "Max", "Min", "Samples", "Young", "Uncertain", "Locality", "Bandwidth", "Engine", "Cooldown",
    "Verifying", "Frozen", "Infeasible",
]  # fmt: skip
"""Reasons why a tier does not get the best size."""


@dataclass(frozen=True)
class Service:
    """Figures that sidecars and engines measure."""

    num_pods: int
    gpus: float
    """GPUs of one pod."""
    prefill_tokens_per_second: float
    """Prefill speed of one pod."""
    kv_bytes_per_token: float
    """KV bytes of one token, over all ranks."""
    tokens_per_access: float
    """Tokens of one chunk."""
    mean_num_pods: float = 0.0
    """Mean number of pods while the lookups were counted; 0: ``num_pods``."""
    engine_cache_bytes: float = 0.0
    """Bytes of one pod's own prefix cache, which the engine looks up first."""
    load_bytes_per_second: float = 0.0
    """Speed of loads from this tier; 0: not measured yet."""
    lower_hits: float = 0.0
    """Share of all accesses that miss this tier and hit lower tiers."""
    lower_worth: float = 0.0
    """Share of a token's compute time that a hit in a lower tier saves."""
    moved_bytes_per_second: float = 0.0
    """Bytes written to and read from the remote tier by all pods together; half-life of an hour."""

    def is_known(self) -> bool:
        """Whether the figures suffice to compute a saving."""
        needed = (
            self.num_pods, self.gpus, self.prefill_tokens_per_second,
            self.kv_bytes_per_token, self.tokens_per_access,
        )  # fmt: skip
        optional = (
            self.mean_num_pods, self.engine_cache_bytes,
            self.load_bytes_per_second, self.moved_bytes_per_second,
        )  # fmt: skip
        return all(0 < x < math.inf for x in needed) and all(0 <= x < math.inf for x in optional)

    def usd_per_token(self, prices: Prices) -> float:
        """Return the saving of loading one token instead of computing it; NaN while figures are missing."""
        if not self.is_known():
            return math.nan
        return self.gpus * prices.gpu_hour / 3600 / self.prefill_tokens_per_second * self.worth

    @property
    def worth(self) -> float:
        """Share of a token's compute time that a hit saves."""
        if not self.load_bytes_per_second:
            return 1.0
        ratio = self.kv_bytes_per_token / self.load_bytes_per_second * self.prefill_tokens_per_second
        return 1 - ratio if ratio < _MAX_LOAD_TIME else 0.0

    def break_even_seconds(self, prices: Prices) -> float:
        """Return the age at which keeping a token costs as much as computing it again."""
        usd_per_second = self.kv_bytes_per_token / GIB * prices.memory_gib_hour / 3600
        return self.usd_per_token(prices) / usd_per_second if usd_per_second else math.inf


class Gain(NamedTuple):
    """Value of a size compared with another one."""

    hits: float
    """Additional hits, as a share of all accesses."""
    saved: float
    """Additional savings, in USD per hour."""
    paid: float
    """Additional costs, in USD per hour."""
    error: float
    """Sampling error of ``saved`` (95 %)."""

    @property
    def net(self) -> float:
        """Net value, in USD per hour."""
        return self.saved - self.paid

    @property
    def low(self) -> float:
        """Lower bound of the net value (95 %)."""
        return self.net - self.error


@dataclass(frozen=True)
class Tier:
    """One tier to size. All its copies (one per pod, or the shared one) have the same size."""

    sizes: tuple[float, ...]
    """Candidate sizes, ascending, in bytes of one copy."""
    usd_per_access: float
    """Savings of one hit."""
    usd_per_byte_hour: float
    """Price of one byte in every copy."""
    lower_hits: float = 0.0
    """Share of all accesses that miss this tier and hit lower tiers."""
    lower_worth: float = 0.0
    """Savings of a hit in a lower tier, as a share of the savings of a hit here."""
    engine_cache_bytes: float = 0.0
    """Bytes of the engine's own cache, which serves the curve's hits up to this size."""
    factors: tuple[float, float] | None = None
    """Largest factors of one step, down and up; None: one step goes to the next candidate."""
    similar_octaves: float = 0.0
    """Distance below which two sizes are similar: a change between them must save more."""
    describe: Callable[[float], str] = field(default=format_size, compare=False)
    """Formats a size for users."""
    limited_at_min: LimitedBy = "Min"
    """Reason why no candidate is smaller than the smallest one."""

    @property
    def is_free(self) -> bool:
        """Whether memory of this tier has no price, so that a growth cannot lose money."""
        return not self.usd_per_byte_hour

    def effective(self, size: float, usable: float) -> float:
        """Return the size at which the curve gives this tier's hits."""
        return max(usable * size, self.engine_cache_bytes)

    def is_similar(self, present: float, size: float) -> bool:
        """Whether a size is too close to the present one for a small saving. The bounds never are."""
        is_close = abs(math.log2(size / present)) < self.similar_octaves
        return is_close and size not in (self.sizes[0], self.sizes[-1])

    def saved(self, demand: Window, hits: float) -> float:
        """Return the savings of additional hits (a share of all accesses), in USD per hour.

        Lower tiers would serve some of these accesses anyway: at most as many as they hit now.
        """
        lower = self.lower_worth * min(hits, self.lower_hits)
        return demand.accesses_per_hour * self.usd_per_access * (hits - lower)

    def gain(self, demand: Window, present: float, size: float, usable: float) -> Gain:
        """Return the value of ``size`` compared with ``present``."""
        low, high = (self.effective(x, usable) for x in sorted((present, size)))
        share, error = demand.between(low, high)
        sign = 1 if size > present else -1
        saved = self.saved(demand, share)
        # This is the largest error: it assumes that lower tiers serve none of the uncertain hits.
        error = self.saved(demand, share + error) - saved
        return Gain(sign * share, sign * saved, self.usd_per_byte_hour * (size - present), error)

    def step(self, present: float, target: float) -> float:
        """Return the size after one step towards ``target``.

        In simulations, steps cost more than they saved. They guard against errors of the prediction.
        """
        low, high = min(present, target), max(present, target)
        if self.factors is not None:
            size = rounded(min(max(target, present * self.factors[0]), present * self.factors[1]))
            return min(high, max(low, size))
        between = [size for size in self.sizes if low < size < high]
        return (between[0] if target > present else between[-1]) if between else target


def memory_tier(smallest: float, largest: float, service: Service, prices: Prices) -> Tier:
    """Return the memory tier of the pods, with candidates from ``smallest`` to ``largest`` bytes."""
    octaves = math.log2(largest / smallest)
    grid = {rounded(smallest * 2 ** (i / _PER_OCTAVE)) for i in range(1, math.ceil(octaves * _PER_OCTAVE))}
    sizes = sorted({smallest, largest, *(size for size in grid if smallest < size < largest)})
    return Tier(
        sizes=tuple(sizes),
        usd_per_access=service.usd_per_token(prices) * service.tokens_per_access,
        usd_per_byte_hour=(service.mean_num_pods or service.num_pods) * prices.memory_gib_hour / GIB,
        lower_hits=service.lower_hits,
        lower_worth=service.lower_worth,
        engine_cache_bytes=service.engine_cache_bytes,
        factors=(_STEP_DOWN, _STEP_UP),
        similar_octaves=_SIMILAR,
        describe=lambda size: f"{format_size(size)} per pod",
    )


def remote_tier(
    counts: Sequence[int], shard_bytes: float, service: Service, prices: Prices, hits_per_hour: float
) -> Tier:
    """Return the managed remote tier, with one candidate for each allowed number of shards (``counts``).

    The traffic sets a minimum, and the size may need more. Traffic never adds shards that cost more than
    their hits save.
    """
    usd_per_access = service.usd_per_token(prices) * service.tokens_per_access
    usd_per_byte_hour = prices.shard_gib_hour / GIB
    needed = 0
    if service.is_known():
        needed = math.ceil(service.moved_bytes_per_second / BYTES_PER_SECOND_OF_A_SHARD)
        usd_per_shard, saved = usd_per_byte_hour * shard_bytes, max(0.0, hits_per_hour) * usd_per_access
        if saved < needed * usd_per_shard:
            needed = int(saved / usd_per_shard)
    enough = [count for count in counts if count >= needed] or [counts[-1]]
    return Tier(
        sizes=tuple(count * shard_bytes for count in enough),
        usd_per_access=usd_per_access,
        usd_per_byte_hour=usd_per_byte_hour,
        describe=lambda size: f"{(count := round(size / shard_bytes))} shard{'s'[: count != 1]}",
        limited_at_min="Bandwidth" if len(enough) < len(counts) else "Min",
    )


def rounded(size: float) -> float:
    """Round a size to a value that reads well."""
    unit = 2.0 ** (math.floor(math.log2(size)) - int(math.log2(_ROUND)))
    return round(size / unit) * unit


def is_near(size: float, other: float) -> bool:
    """Whether two sizes are equal up to the rounding that pods apply."""
    return math.isclose(size, other, rel_tol=0.01)
