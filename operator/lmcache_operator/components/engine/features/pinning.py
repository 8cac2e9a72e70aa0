"""Whether CUDA has pinned the memory tiers that copies use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.components.engine.features.base import HealthFeature, HealthReport, count_of, part_of
from lmcache_store.common.text import plain


class Pinning(HealthFeature):
    """Pinned memory, which copies to and from a GPU need for their speed."""

    name = "pinning"
    condition_type = "MemoryTierPinned"
    success = "Pinned", "The memory tiers of all {} GPU pods are pinned."
    failure = (
        "MemoryNotPinned",
        "memory tiers are not fully pinned, so copies between them and the GPU are slow",
    )

    def read(self, stats: Mapping[str, Any]) -> HealthReport:
        """Parse the part of ``/stats`` about copies. Without GPUs, it reports nothing."""
        transfer = part_of(stats, "transfer")
        if problem := plain(transfer.get("pin_problem")):
            return HealthReport(False, problem)
        is_pinned = any(map(count_of, part_of(transfer, "pinned_bytes").values()))
        return HealthReport(True if is_pinned else None)
