"""What a size of one tier saves and costs, in USD per hour. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lmcache.curves import Window
from lmcache.units import format_size

GIB = 2.0**30
BYTES_PER_SECOND_OF_A_SHARD = 1e9
"""That a shard is planned to move: half of what one connection was measured to carry."""

_NOT_WORTH = 0.8  # of the time to compute a token: from there on loading it is not even tried
_STEP_UP, _STEP_DOWN = 2.0, 1 / 1.5
_SIMILAR = 0.4  # octaves: with 0 there were 9 changes instead of 5 in days and nights, which cost 0.3 % more
_PER_OCTAVE = 8  # candidate sizes: twice as far apart, the worst case cost 21 % instead of 12 %
_ROUND = 32  # of an octave: 108Gi, not 107.63Gi


LimitedBy = Literal[
    "None", "Max", "Min", "Samples", "Young", "Uncertain", "Locality", "Bandwidth", "Engine", "Cooldown",
    "Verifying", "Frozen", "Infeasible",
]  # fmt: skip
"""What keeps a size from being the best there is."""


@dataclass(frozen=True)
class Prices:
    """What things cost, in USD."""

    gpu_hour: float
    """One GPU for an hour. Only money if a GPU that is not needed is given back."""
    memory_gib_hour: float
    """One GiB of pods' own memory for an hour; 0 for memory that is paid for anyway."""
    shard_gib_hour: float
    """One GiB of the remote tier's servers for an hour."""


@dataclass(frozen=True)
class Service:
    """What sidecars and engines measure of themselves."""

    num_pods: int
    gpus: float
    """Of one pod."""
    prefill_tokens_per_second: float
    """Of one pod."""
    kv_bytes_per_token: float
    """Over all ranks."""
    tokens_per_access: float
    """Of one chunk."""
    paid_pods: float = 0.0
    """That there were while what is counted was looked up, on average; 0: as many as now."""
    engine_cache_bytes: float = 0.0
    """Of one pod's own prefix cache, which is asked first."""
    load_bytes_per_second: float = 0.0
    """From this tier; 0: not measured yet."""
    lower_hits: float = 0.0
    """Share of all accesses that lower tiers have, and this one does not."""
    lower_worth: float = 0.0
    """What such a hit saves of the time to compute a token."""
    moved_bytes_per_second: float = 0.0
    """Written to the remote tier and read from it by all pods together, on average of an hour or so."""

    def is_known(self) -> bool:
        """Whether a saving can be told from these figures."""
        needed = (
            self.num_pods, self.gpus, self.prefill_tokens_per_second,
            self.kv_bytes_per_token, self.tokens_per_access,
        )  # fmt: skip
        others = (
            self.paid_pods, self.engine_cache_bytes, self.load_bytes_per_second, self.moved_bytes_per_second,
        )  # fmt: skip
        return all(0 < x < math.inf for x in needed) and all(0 <= x < math.inf for x in others)

    def usd_per_token(self, prices: Prices) -> float:
        """Of one token that is loaded, and not computed; NaN if that can't be told."""
        if not self.is_known():
            return math.nan
        return self.gpus * prices.gpu_hour / 3600 / self.prefill_tokens_per_second * self.worth

    @property
    def worth(self) -> float:
        """What a hit saves of the time to compute a token."""
        if not self.load_bytes_per_second:
            return 1.0
        ratio = self.kv_bytes_per_token / self.load_bytes_per_second * self.prefill_tokens_per_second
        return 1 - ratio if ratio < _NOT_WORTH else 0.0

    def break_even_seconds(self, prices: Prices) -> float:
        """A token that comes back later than this costs more memory than it saves."""
        usd_per_second = self.kv_bytes_per_token / GIB * prices.memory_gib_hour / 3600
        return self.usd_per_token(prices) / usd_per_second if usd_per_second else math.inf


class Gain(NamedTuple):
    """What a size is worth, compared with another."""

    hits: float
    """Share of all accesses that it hits more."""
    saved: float
    """USD per hour that they save."""
    paid: float
    """USD per hour that the size costs more."""
    error: float
    """Of ``saved``: 95 % confidence."""

    @property
    def net(self) -> float:
        """USD per hour."""
        return self.saved - self.paid

    @property
    def low(self) -> float:
        """What it is worth at least."""
        return self.net - self.error


def _in_full(num_bytes: float) -> str:
    return format_size(round(num_bytes))


@dataclass(frozen=True)
class Tier:
    """One tier that is sized. All copies of it (one per pod, or the one that is shared) have one size."""

    sizes: tuple[float, ...]
    """Candidates, ascending, in bytes of one copy."""
    usd_per_access: float
    """That a hit saves."""
    usd_per_byte_hour: float
    """Of all copies."""
    lower_hits: float = 0.0
    """Share of all accesses that lower tiers have, and this one does not."""
    lower_worth: float = 0.0
    """What such a hit saves, of what one here saves."""
    nearer_bytes: float = 0.0
    """What is hit up to this size is hit by the engine, whatever this tier's."""
    factors: tuple[float, float] | None = None
    """How far one step goes, down and up; None: to the next candidate."""
    similar_octaves: float = 0.0
    """Sizes nearer than this to the present one are as good, as a rule: to go there has to bring more."""
    describe: Callable[[float], str] = field(default=_in_full, compare=False)
    """A size, for people."""
    least_is: LimitedBy = "Min"
    """What keeps it from being smaller than all candidates."""

    @property
    def is_free(self) -> bool:
        """Whether a larger size costs nothing, so that growing can lose nothing."""
        return not self.usd_per_byte_hour

    def effective(self, size: float, usable: float) -> float:
        """What a curve has to be asked for."""
        return max(usable * size, self.nearer_bytes)

    def is_similar(self, present: float, size: float) -> bool:
        """Whether a size is too near to be gone to for a little; the bounds never are."""
        is_near = abs(math.log2(size / present)) < self.similar_octaves
        return is_near and size not in (self.sizes[0], self.sizes[-1])

    def saved(self, demand: Window, hits: float) -> float:
        """USD per hour that more hits save, a share of all accesses. Lower tiers hold what was used last: of
        what a larger size hits more, or a smaller one less, they have as much as they hit now, if there is
        so much."""
        others = self.lower_worth * min(hits, self.lower_hits)
        return demand.accesses_per_hour * self.usd_per_access * (hits - others)

    def gain(self, demand: Window, present: float, size: float, usable: float) -> Gain:
        """What ``size`` is worth instead of ``present``."""
        low, high = (self.effective(x, usable) for x in sorted((present, size)))
        share, error = demand.between(low, high)
        sign = 1 if size > present else -1
        saved = self.saved(demand, share)
        unsure = self.saved(demand, share + error) - saved  # the most there is: beyond what lower tiers have
        return Gain(sign * share, sign * saved, self.usd_per_byte_hour * (size - present), unsure)

    def step(self, present: float, target: float) -> float:
        """How far to go at once: it cost more than it saved in simulations, and guards against the rest."""
        low, high = min(present, target), max(present, target)
        if self.factors is not None:
            size = rounded(min(max(target, present * self.factors[0]), present * self.factors[1]))
            return min(high, max(low, size))
        between = [size for size in self.sizes if low < size < high]
        return (between[0] if target > present else between[-1]) if between else target


def memory_tier(smallest: float, largest: float, service: Service, prices: Prices) -> Tier:
    """The memory of each pod, in bytes."""
    octaves = math.log2(largest / smallest)
    grid = {rounded(smallest * 2 ** (i / _PER_OCTAVE)) for i in range(1, math.ceil(octaves * _PER_OCTAVE))}
    sizes = sorted({smallest, largest, *(size for size in grid if smallest < size < largest)})
    return Tier(
        sizes=tuple(sizes),
        usd_per_access=service.usd_per_token(prices) * service.tokens_per_access,
        usd_per_byte_hour=(service.paid_pods or service.num_pods) * prices.memory_gib_hour / GIB,
        lower_hits=service.lower_hits,
        lower_worth=service.lower_worth,
        nearer_bytes=service.engine_cache_bytes,
        factors=(_STEP_DOWN, _STEP_UP),
        similar_octaves=_SIMILAR,
        describe=lambda size: f"{_in_full(size)} per pod",
    )


def remote_tier(
    counts: Sequence[int], shard_bytes: float, service: Service, prices: Prices, hits_per_hour: float
) -> Tier:
    """Shards that all pods share; ``counts``: how many there may be. As many as their bandwidth asks for, or
    their size, whichever is more; but never more for bandwidth than what is hit in them pays for."""
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
        least_is="Bandwidth" if len(enough) < len(counts) else "Min",
    )


def rounded(size: float) -> float:
    """A size near this one that reads well."""
    unit = 2.0 ** (math.floor(math.log2(size)) - int(math.log2(_ROUND)))
    return round(size / unit) * unit
