"""Autoscaling of tiers, as declared in the spec and reported in the status."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal

from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import matches, size_between
from lmcache_operator.api.tiers import MAX_SHARDS
from lmcache_store.common.units import parse_quantity, parse_size

OFF: Literal["Off"] = "Off"
AUTO: Literal["Auto"] = "Auto"
_USD_OF_SHARDS = Decimal("0.004")
_USD: dict[str, Any] = {
    "maxLength": 20,
    "rules": (
        matches(r"^[0-9]{1,7}(\.[0-9]{1,8})?$", 'must be an amount in USD, in quotes, such as "2.50"'),
    ),
}


class MemoryBounds(Part):
    """Bounds of the size of each pod's memory tier."""

    RULES = (
        Rule(
            "!has(self.minSize) || !isQuantity(self.minSize) || !isQuantity(self.maxSize) || "
            "quantity(self.minSize).compareTo(quantity(self.maxSize)) <= 0",
            "minSize must not be more than maxSize",
            lambda b: b.min_size is None or parse_quantity(b.min_size) <= parse_quantity(b.max_size),
        ),
    )

    min_size: str | None = field(
        "Smallest size of each pod's memory tier, in bytes. Default: a quarter of tiers.memory.size.",
        **size_between("autoscaling.memory.minSize", "64Mi", "16Ti"),
    )
    max_size: str = field(
        "Largest size of each pod's memory tier, in bytes. Its node must have that much free.",
        **size_between("autoscaling.memory.maxSize", "64Mi", "16Ti"),
    )


class ShardBounds(Part):
    """Bounds of the number of shards of the managed remote tier."""

    RULES = (
        Rule(
            "self.minShards <= self.maxShards",
            "minShards must not be more than maxShards",
            lambda bounds: bounds.min_shards <= bounds.max_shards,
        ),
    )

    min_shards: int = field("Smallest number of shards.", default=1, minimum=1, maximum=MAX_SHARDS)
    max_shards: int = field("Largest number of shards.", minimum=1, maximum=MAX_SHARDS)


class PricesSpec(Part):
    """Prices in USD. Decisions depend only on their ratio."""

    gpu_hour: str = field(
        "Price of one GPU for an hour, in USD. It is the cost of computing prompt tokens again. The default, "
        '"2.50", is about the cloud price of a reserved H100.',
        default="2.50",
        **_USD,
    )
    memory_gi_b_hour: str = field(
        'Price of one GiB of a pod\'s memory tier for an hour, in USD. The default is "0", because you pay '
        "for a GPU node's memory with its GPUs. The tier then grows up to memory.maxSize while hits "
        "increase. Set a price if you can use, or need not pay for, memory that the tier releases.",
        default="0",
        **_USD,
    )
    shard_gi_b_hour: str | None = field(
        "Price of one GiB of the managed remote tier's servers for an hour, in USD. Default: memoryGiBHour "
        'if it is more than 0, or else "0.004", about the cloud price of memory in large machines.',
        **_USD,
    )

    @property
    def usd_per_hour(self) -> tuple[float, float, float]:
        """Prices of one GPU, of one GiB of pods' memory, and of one GiB of shards."""
        gpu, memory = Decimal(self.gpu_hour), Decimal(self.memory_gi_b_hour)
        shard = Decimal(self.shard_gi_b_hour) if self.shard_gi_b_hour else memory or _USD_OF_SHARDS
        return float(gpu), float(memory), float(shard)


class AutoscalingSpec(Part):
    """Autoscaling of tiers by their savings and costs."""

    RULES = (
        Rule(
            "self.mode != 'Auto' || has(self.memory) || has(self.remote)",
            "mode Auto changes only tiers with bounds: set memory.maxSize, remote.maxShards, or both",
            lambda scaling: scaling.mode != AUTO or scaling.memory is not None or scaling.remote is not None,
        ),
    )

    mode: str = field(
        "Recommend: the operator reports the best sizes in status.autoscaling, and changes nothing. Auto: it "
        "also applies them, while pods run, to tiers with bounds; the spec stays as it is. Off: it does not "
        "poll sidecars. If you switch from Auto to another mode, tiers return to the declared sizes.",
        default="Recommend",
        enum=["Off", "Recommend", "Auto"],
    )
    memory: MemoryBounds | None = field(
        "Bounds of tiers.memory.size. Default, only for recommendations: a quarter to four times of it."
    )
    remote: ShardBounds | None = field(
        "Bounds of tiers.remote.managed.shards. Default, only for recommendations: 1 to four times as many."
    )
    prices: PricesSpec = field("Prices in USD. Decisions depend only on their ratio.", default={})

    def memory_bounds(self, declared_bytes: int) -> tuple[int, int]:
        """Return the smallest and the largest size of a pod's memory tier, for its declared size."""
        smallest, largest = max(64 << 20, declared_bytes // 4), 4 * declared_bytes
        if self.memory is None:
            return smallest, largest
        largest = parse_size(self.memory.max_size)
        return parse_size(self.memory.min_size) if self.memory.min_size else min(smallest, largest), largest

    def shard_bounds(self, declared_number: int) -> tuple[int, int]:
        """Return the smallest and the largest number of shards, for the declared number."""
        if self.remote is None:
            return 1, min(MAX_SHARDS, 4 * declared_number)
        return self.remote.min_shards, self.remote.max_shards


def _within(path: str, operator: str, bound: str) -> str:
    """Compare two sizes in CEL. Values that are not sizes pass, because another rule refuses them."""
    value, other = f"self.{path}", f"self.{bound}"
    compared = f"quantity({value}).compareTo(quantity({other})) {operator} 0"
    return f"(!isQuantity({value}) || !isQuantity({other}) || {compared})"


def _is_memory_within(spec: Any) -> bool:
    bounds, memory = spec.autoscaling.memory, spec.tiers.memory
    if bounds is None or memory is None:
        return True
    size = parse_quantity(memory.size)
    smallest = size if bounds.min_size is None else parse_quantity(bounds.min_size)
    return bool(smallest <= size <= parse_quantity(bounds.max_size))


def _are_shards_within(spec: Any) -> bool:
    bounds, managed = spec.autoscaling.remote, spec.tiers.managed
    return bounds is None or managed is None or bounds.min_shards <= managed.shards <= bounds.max_shards


_NO_MEMORY_BOUNDS = "!has(self.autoscaling) || !has(self.autoscaling.memory) || !has(self.tiers.memory)"
SPEC_RULES = (
    Rule(
        "!has(self.autoscaling) || has(self.engine) || "
        "!(has(self.autoscaling.memory) || has(self.autoscaling.remote))",
        "autoscaling needs an engine: set autoscaling at the clusters that use this tier",
        lambda spec: spec.engine is not None or not (spec.autoscaling.memory or spec.autoscaling.remote),
    ),
    Rule(
        "!has(self.autoscaling) || !has(self.autoscaling.remote) || !has(self.engine) || "
        "(has(self.tiers.remote) && has(self.tiers.remote.managed))",
        "autoscaling.remote needs tiers.remote.managed: the operator changes only its own servers",
        lambda spec: spec.autoscaling.remote is None or not spec.engine or spec.tiers.managed is not None,
    ),
    Rule(
        f"{_NO_MEMORY_BOUNDS} || {_within('tiers.memory.size', '<=', 'autoscaling.memory.maxSize')} && "
        f"(!has(self.autoscaling.memory.minSize) || "
        f"{_within('tiers.memory.size', '>=', 'autoscaling.memory.minSize')})",
        "tiers.memory.size must be within autoscaling.memory.minSize and maxSize",
        _is_memory_within,
    ),
    Rule(
        "!has(self.autoscaling) || !has(self.autoscaling.remote) || !has(self.tiers.remote) || "
        "!has(self.tiers.remote.managed) || "
        "(self.autoscaling.remote.minShards <= self.tiers.remote.managed.shards && "
        "self.tiers.remote.managed.shards <= self.autoscaling.remote.maxShards)",
        "tiers.remote.managed.shards must be within autoscaling.remote.minShards and maxShards",
        _are_shards_within,
    ),
)
"""Rules of the whole spec."""


class CurvePoint(Part):
    """One size on the curve of a tier."""

    size: str = field("Bytes of the tier: of one pod, or of all shards together.")
    hit: str = field("Expected share of prompt tokens that hit, including hits in the engine's own cache.")
    low: str | None = field("The share minus its sampling error (95 %). Absent if all keys are sampled.")
    high: str | None = field("The share plus its sampling error (95 %).")
    net_per_hour: str | None = field("Net value in USD per hour, compared with the present size.")


class Saving(Part):
    """Net value of the recommended size, compared with the present one."""

    usd_per_hour: str | None = field("Saved GPU time minus the cost of memory, in USD per hour.")
    low: str | None = field("The saving minus its sampling error (95 %).")
    high: str | None = field("The saving plus its sampling error (95 %).")


class LocalityLoss(Part):
    """Misses of requests that were routed to a pod without their prefix, while another pod holds it."""

    points: str | None = field("Lost hits, in per cent of all prompt tokens.")
    usd_per_hour: str | None = field("Value of the lost hits, in USD per hour.")


class _TierSizes(Part):
    reason: str | None = field("Reason for the recommended size, or for no change, with figures.")
    limited_by: str | None = field(
        "What keeps the size from being the best one: None, Max, Min, Samples, Young, Uncertain, "
        "Locality, Bandwidth, Engine, Cooldown, Verifying, Frozen or Infeasible."
    )
    keys_in_size: int | None = field("Sampled keys that fit into the present size.", format="int64")
    saving: Saving | None = field("Net value of the recommended size, compared with the present one.")
    curve: list[CurvePoint] | None = field("Expected hits and net value of other sizes.", maxItems=32)


class MemorySizes(_TierSizes):
    """Sizes of the memory tier."""

    current: str | None = field("Present bytes of each pod.")
    recommended: str | None = field("Recommended bytes of each pod.")
    next: str | None = field("Bytes of each pod after the next step of mode Auto.")


class RemoteSizes(_TierSizes):
    """Sizes of the managed remote tier."""

    current: int | None = field("Present number of shards.")
    recommended: int | None = field("Recommended number of shards.")
    next: int | None = field("Number of shards after the next step of mode Auto.")


class AutoscalingStatus(Part):
    """Recommended sizes of the tiers, and the reasons."""

    observed_at: str | None = field("Time of the last update of this status.", format="date-time")
    window: str | None = field("Half-life of the counts.")
    samples: int | None = field("Number of sampled lookups.", format="int64")
    memory: MemorySizes | None = field("Sizes of the memory tier.")
    remote: RemoteSizes | None = field("Sizes of the managed remote tier.")
    engine_hit: str | None = field("Share of the prompt tokens that engines hit in their own caches.")
    locality_loss: LocalityLoss | None = field(
        "Misses of requests that were routed to a pod without their prefix, while another pod holds it."
    )
    break_even_age: str | None = field("Age at which keeping a token costs as much as computing it again.")
