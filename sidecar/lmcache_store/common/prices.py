"""Prices of GPUs and tiers, as an LMCacheCluster declares them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class Prices:
    """Prices in USD. The defaults are those of ``spec.autoscaling.prices``."""

    gpu_hour: float = 2.50
    """One GPU for an hour. This is money only if you use the GPU time that is saved."""
    memory_gib_hour: float = 0.0
    """One GiB of pods' own memory for an hour; 0: the memory is paid for anyway."""
    shard_gib_hour: float = 0.004
    """One GiB of the remote tier's servers for an hour."""
    disk_gib_hour: float = 0.0
    """One GiB of the disk tier for an hour. The resource has no price for it."""
