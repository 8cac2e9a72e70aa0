"""Accepted and refused declarations of sizes, and an autoscaler whose choice a test sets."""

import contextlib
from collections.abc import Mapping
from typing import Any

from lmcache_operator.contract.base import Observed
from lmcache_operator.policy.report import Choice, Report, restore
from lmcache_operator.specs.kinds import ClusterKey, Ref

GIB = 1 << 30
_MANAGED = {"remote": {"managed": {"shards": 2, "memoryPerShard": "1Gi"}}}
_SIZES: Any = {"maxSize": "256Gi"}

ACCEPTED: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"mode": "Off"}, {}),
    ({"memory": {"minSize": "64Gi", "maxSize": "64Gi"}}, {}),
    ({"mode": "Auto", "memory": _SIZES, "prices": {"gpuHour": "0", "memoryGiBHour": "12.5"}}, {}),
    ({"mode": "Auto", "remote": {"maxShards": 2}}, _MANAGED),
    ({"mode": "Auto", "memory": _SIZES, "remote": {"minShards": 2, "maxShards": 64}}, _MANAGED),
]
"""Values of spec.autoscaling, and tiers in addition to a memory tier of 64Gi."""

REFUSED: list[tuple[Any, Any, str]] = [
    ({"mode": "Manual"}, {}, "spec.autoscaling.mode"),
    ({"mode": "Auto"}, {}, "mode Auto changes only tiers with bounds"),
    ({"memory": {}}, {}, "spec.autoscaling.memory.maxSize"),
    ({"memory": {"maxSize": "1Ki"}}, {}, "autoscaling.memory.maxSize must be between 64Mi and 16Ti"),
    ({"memory": {"maxSize": "many"}}, {}, "must be an amount of bytes such as 64Gi"),
    ({"memory": {"minSize": "128Gi", "maxSize": "64Gi"}}, {}, "minSize must not be more than maxSize"),
    ({"memory": {"maxSize": "32Gi"}}, {}, "tiers.memory.size must be within"),
    ({"memory": {"minSize": "128Gi", "maxSize": "256Gi"}}, {}, "tiers.memory.size must be within"),
    ({"remote": {"maxShards": 2}}, {}, "needs tiers.remote.managed"),
    ({"remote": {"minShards": 3, "maxShards": 2}}, _MANAGED, "minShards must not be more than maxShards"),
    ({"remote": {"maxShards": 1}}, _MANAGED, "tiers.remote.managed.shards must be within"),
    ({"remote": {"maxShards": 65}}, _MANAGED, "spec.autoscaling.remote.maxShards"),
    ({"prices": {"gpuHour": "cheap"}}, {}, "must be an amount in USD"),
    ({"prices": {"memoryGiBHour": "-1"}}, {}, "must be an amount in USD"),
    ({"prices": {"shardGiBHour": "free"}}, {}, "must be an amount in USD"),
    ({"prices": {"gpuHour": 2}}, {}, "spec.autoscaling.prices.gpuHour"),
]
"""The same, with the message of the refusal."""


class ScriptedAutoscaler:
    """An autoscaler that reports the choice of the test. It begins with the persisted choice."""

    def __init__(self, config: Ref) -> None:
        self.choice: Choice | None = None
        self._config, self._is_new = config, True

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        live = observed["autoscaling"].children.get(self._config)
        if self._is_new and live:
            with contextlib.suppress(ValueError):
                self.choice = restore(live["data"]).memory
        self._is_new = False
        return Report({}, memory=self.choice, state="counted")

    def forget(self, key: ClusterKey) -> None:
        """Forget the cluster. There is nothing to forget."""


class Chooser:
    """An autoscaler that makes one choice for each cluster in mode Auto."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        is_auto = observed["autoscaling"].resource["spec"]["autoscaling"]["mode"] == "Auto"
        return Report({}, memory=self._choice, state="counted") if is_auto else None

    def forget(self, key: ClusterKey) -> None:
        """Forget the cluster. There is nothing to forget."""
