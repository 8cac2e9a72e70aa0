"""How the sizes of a cluster's tiers follow what they gain, as a user declares it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal

from lmcache.units import parse_quantity, parse_size
from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import matches, size_between
from lmcache_operator.api.tiers import MAX_SHARDS

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
    """Between what sizes of each pod's memory tier to choose."""

    RULES = (
        Rule(
            "!has(self.minSize) || !isQuantity(self.minSize) || !isQuantity(self.maxSize) || "
            "quantity(self.minSize).compareTo(quantity(self.maxSize)) <= 0",
            "minSize must not be more than maxSize",
            lambda own: own.min_size is None or parse_quantity(own.min_size) <= parse_quantity(own.max_size),
        ),
    )

    min_size: str | None = field(
        "Least bytes of the arena of each pod. Default: a quarter of tiers.memory.size.",
        **size_between("autoscaling.memory.minSize", "64Mi", "16Ti"),
    )
    max_size: str = field(
        "Most bytes of the arena of each pod: what its node has for it.",
        **size_between("autoscaling.memory.maxSize", "64Mi", "16Ti"),
    )


class ShardBounds(Part):
    """Between what numbers of shards of the managed remote tier to choose."""

    RULES = (
        Rule(
            "self.minShards <= self.maxShards",
            "minShards must not be more than maxShards",
            lambda own: own.min_shards <= own.max_shards,
        ),
    )

    min_shards: int = field("Least number of shards.", default=1, minimum=1, maximum=MAX_SHARDS)
    max_shards: int = field("Most shards.", minimum=1, maximum=MAX_SHARDS)


class Prices(Part):
    """What is weighed against each other, in USD. Only their ratio decides."""

    gpu_hour: str = field(
        'One GPU for an hour: what prompt tokens cost that have to be computed again. The default, "2.50", '
        "is about what a cloud takes for an H100 that is reserved.",
        default="2.50",
        **_USD,
    )
    memory_gi_b_hour: str = field(
        'One GiB of a memory tier of a pod for an hour. The default is "0", because the memory of a GPU node '
        "is paid for with its GPUs. The tier then grows as long as more is hit, up to memory.maxSize. Set a "
        "price if memory that the tier gives back is used, or not paid for.",
        default="0",
        **_USD,
    )
    shard_gi_b_hour: str | None = field(
        "One GiB of the managed remote tier's servers for an hour. Default: memoryGiBHour if that is more "
        'than 0, or else "0.004", which is about what a cloud takes for memory in large machines.',
        **_USD,
    )

    @property
    def usd_per_hour(self) -> tuple[float, float, float]:
        """Of one GPU, of one GiB of pods' memory, and of one GiB of shards."""
        gpu, memory = Decimal(self.gpu_hour), Decimal(self.memory_gi_b_hour)
        shard = Decimal(self.shard_gi_b_hour) if self.shard_gi_b_hour else memory or _USD_OF_SHARDS
        return float(gpu), float(memory), float(shard)


class Autoscaling(Part):
    """How large tiers should be, by what they gain and cost."""

    RULES = (
        Rule(
            "self.mode != 'Auto' || has(self.memory) || has(self.remote)",
            "mode Auto changes what has bounds: set memory.maxSize, remote.maxShards, or both",
            lambda own: own.mode != AUTO or own.memory is not None or own.remote is not None,
        ),
    )

    mode: str = field(
        "Recommend: status.autoscaling tells what sizes would be best, and why; nothing is changed. Auto: "
        "tiers that have bounds here get these sizes while pods run; spec stays as it is. Off: sidecars are "
        "not asked for what is looked up. Away from Auto, sizes go back to what is declared.",
        default="Recommend",
        enum=["Off", "Recommend", "Auto"],
    )
    memory: MemoryBounds | None = field(
        "Bounds of tiers.memory.size. Default: from a quarter of it to four times of it, to recommend only."
    )
    remote: ShardBounds | None = field(
        "Bounds of tiers.remote.managed.shards. Default: from 1 to four times as many, to recommend only."
    )
    prices: Prices = field("What is weighed against each other.", default={})

    def memory_bounds(self, declared_bytes: int) -> tuple[int, int]:
        """Least and most bytes of a pod's memory tier, where this many are declared."""
        least, most = max(64 << 20, declared_bytes // 4), 4 * declared_bytes
        if self.memory is None:
            return least, most
        most = parse_size(self.memory.max_size)
        return parse_size(self.memory.min_size) if self.memory.min_size else min(least, most), most

    def shard_bounds(self, declared_number: int) -> tuple[int, int]:
        """Least and most shards, where this many are declared."""
        if self.remote is None:
            return 1, min(MAX_SHARDS, 4 * declared_number)
        return self.remote.min_shards, self.remote.max_shards


class CurvePoint(Part):
    """What one size would do."""

    size: str = field("All bytes of the tier: of one pod, or of all shards.")
    hit: str = field("Share of the prompt tokens that it would hit, the engine's own cache included.")
    low: str | None = field("The share less its sampling error (95 %); none if all keys are sampled.")
    high: str | None = field("The share plus its sampling error.")
    net_per_hour: str | None = field("USD that it is worth more than the present size.")


class Saving(Part):
    """What the recommended size is worth more than the present one."""

    usd_per_hour: str | None = field("GPU time saved, less what memory costs.")
    low: str | None = field("The same less its sampling error (95 %).")
    high: str | None = field("The same plus its sampling error.")


class LocalityLoss(Part):
    """What is missed because requests go to other pods than those that hold their prefixes."""

    points: str | None = field("Per cent of all prompt tokens.")
    usd_per_hour: str | None = field("The same in money.")


class _Sized(Part):
    reason: str | None = field("Why it is recommended, or why nothing is changed, with figures.")
    limited_by: str | None = field(
        "What keeps the size from being the best there is: None, Max, Min, Samples, Young, Uncertain, "
        "Locality, Bandwidth, Engine, Cooldown, Verifying, Frozen or Infeasible."
    )
    keys_in_size: int | None = field("Sampled keys that the present size holds.", format="int64")
    saving: Saving | None = field("What it is worth.")
    curve: list[CurvePoint] | None = field("What other sizes would do.", maxItems=32)


class MemorySizes(_Sized):
    """The memory tier."""

    current: str | None = field("Bytes of each pod.")
    recommended: str | None = field("Bytes that each pod should have.")
    next: str | None = field("Bytes that Auto gives each pod next.")


class RemoteSizes(_Sized):
    """The managed remote tier."""

    current: int | None = field("Shards.")
    recommended: int | None = field("Shards that there should be.")
    next: int | None = field("Shards that Auto goes to next.")


class AutoscalingStatus(Part):
    """What sizes would be best, and why."""

    observed_at: str | None = field("When this was last news.", format="date-time")
    window: str | None = field("Half-life of what is counted.")
    samples: int | None = field("Sampled lookups.", format="int64")
    memory: MemorySizes | None = field("The memory tier.")
    remote: RemoteSizes | None = field("The managed remote tier.")
    engine_hit: str | None = field("Share of the prompt tokens that engines hit in their own caches.")
    locality_loss: LocalityLoss | None = field(
        "What is missed because requests go to other pods than those that hold their prefixes."
    )
    break_even_age: str | None = field("A token that comes back later than this is not worth its memory.")
