"""Whether other pods and lower tiers can use the KV of the engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.components.engine.features.base import HealthFeature, HealthReport, part_of
from lmcache_store.common.text import plain

_TIERS = "remote", "disk", "peers"


class Sharing(HealthFeature):
    """KV that lower tiers can hold, so that other pods and later engines find it."""

    name = "sharing"
    condition_type = "KVShared"
    success = "Shared", "Lower tiers can hold the KV of all {} engine pods."
    failure = "KVPrivate", "engine pods share no KV, so only their own memory holds it"

    def read(self, stats: Mapping[str, Any]) -> HealthReport:
        """Parse why an engine's keys are private. Without an engine or a lower tier, that has no effect."""
        reason = stats.get("private_reason")
        if not isinstance(reason, str) or not any(part_of(stats, tier) for tier in _TIERS):
            return HealthReport()
        return HealthReport(not reason, plain(reason))
