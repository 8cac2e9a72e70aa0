"""Whether other pods and lower tiers can use the KV of the engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_operator.components.engine.features.base import PodFeature, part_of
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of
from lmcache_store.common.text import plain

_TIERS = "remote", "disk", "peers"


class SharingReport(NamedTuple):
    """A sidecar's report on the keys of its engine."""

    is_shared: bool | None = None
    """Whether lower tiers can hold the KV; None: no engine, no lower tier, or unknown."""
    reason: str = ""
    """Why they hold none of it."""


class Sharing(PodFeature[SharingReport]):
    """KV that lower tiers can hold, so that other pods and later engines find it."""

    name = "sharing"
    condition_type = "KVShared"
    absent = SharingReport()
    quoted = ("reason",)

    def read(self, stats: Mapping[str, Any]) -> SharingReport:
        """Parse why an engine's keys are private. Without a lower tier, that has no effect."""
        reason = stats.get("private_reason")
        if not isinstance(reason, str) or not any(part_of(stats, tier) for tier in _TIERS):
            return SharingReport()
        return SharingReport(not reason, plain(reason))

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether lower tiers can hold the KV of all engines; None: no sidecar reports it."""
        reports = [(sidecar.pod, self.report(sidecar)) for sidecar in sidecars]
        number = sum(report.is_shared is not None for _, report in reports)
        private = [(pod, report.reason) for pod, report in reports if report.is_shared is False]
        problem = "engines share no KV, so only the memory of their pods holds it"
        message = f"Lower tiers can hold the KV of all {number} engines."
        failure = failure_of("KVPrivate", problem, private, number)
        return failure or (Condition("True", "Shared", message) if number else None)
