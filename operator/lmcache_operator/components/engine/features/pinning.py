"""Whether CUDA has pinned the memory tiers that copies use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.components.engine.features.base import PodFeature, count_of, part_of
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of
from lmcache_store.common.text import plain


class PinReport(NamedTuple):
    """A sidecar's report on its memory tier."""

    is_pinned: bool | None = None
    """Whether CUDA has pinned all memory of the tier that copies use; None: no GPU, or unknown."""
    problem: str = ""
    """Process that could not pin memory, and the reason."""


class Pinning(PodFeature[PinReport]):
    """Pinned memory, which copies to and from a GPU need for their speed."""

    name = "pinning"
    condition_type = "MemoryTierPinned"
    absent = PinReport()
    quoted = ("problem",)

    def read(self, stats: Mapping[str, Any]) -> PinReport:
        """Parse the part of ``/stats`` about copies."""
        transfer = part_of(stats, "transfer")
        if problem := plain(transfer.get("pin_problem")):
            return PinReport(False, problem)
        is_pinned = any(map(count_of, part_of(transfer, "pinned_bytes").values()))
        return PinReport(True if is_pinned else None)

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether CUDA has pinned the memory tiers; None: no sidecar reports it, such as without GPUs."""
        reports = [(sidecar.pod, self.report(sidecar)) for sidecar in sidecars]
        number = sum(report.is_pinned is not None for _, report in reports)
        failed = [(pod, report.problem) for pod, report in reports if report.is_pinned is False]
        problem = "memory tiers are not fully pinned, so copies between them and the GPU are slow"
        message = f"The memory tiers of all {number} GPU pods are pinned."
        failure = failure_of("MemoryNotPinned", problem, failed, number)
        return failure or (Condition("True", "Pinned", message) if number else None)
