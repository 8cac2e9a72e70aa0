"""The contract of a feature of the engine pod, such as the disk tier. Pure.

A feature is one module with everything that the operator does for it in an engine pod: volumes, options of
the sidecar, its part of the spec hash, and the parsing and judgement of sidecars' reports. The modules that
render and report loop over ``FEATURES`` and know no feature.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.types import Spec
from lmcache_operator.contract.base import Observed, Plan, SidecarState
from lmcache_operator.contract.conditions import Condition, Expected, Trouble, failure_of, former_conditions
from lmcache_operator.specs import Object, names, stateful
from lmcache_store.common.text import plain

POD_NAME = "KUBERNETES_POD_NAME"
"""Variable with the pod's name, from which the kubelet makes other variables."""
_SILENT = "the sidecar gives no reason"
_MAX_COUNT = 1 << 63
_FIGURE = re.compile(r"[0-9.]+")
Report = TypeVar("Report")
"""A sidecar's report on one feature."""


class Volume(NamedTuple):
    """A volume of the engine pod."""

    name: str
    path: str
    """Mount path, the same in every container."""
    source: Object
    users: tuple[str, ...] = (names.SIDECAR,)
    """Containers that mount it."""


class PodFeature(Generic[Report]):
    """A feature of the engine pod. By default, a feature has no part in anything."""

    name: ClassVar[str]
    """Key of the sidecars' reports. Of a tier, also the tier's name in ``/stats`` and in the status."""
    is_tier: ClassVar[bool] = False
    """Whether lookups can hit in the feature."""
    condition_type: ClassVar[str] = ""
    """Type of the feature's condition; empty: it has none."""
    awaited_reasons: ClassVar[Container[str]] = ()
    """Reasons of the condition that end without a change of any object. Later probes show when."""
    reserved: ClassVar[Mapping[str, str]] = {}
    """Field of the spec that sets a variable of the sidecar, by a prefix of the variable's name."""
    reserved_labels: ClassVar[Mapping[str, str]] = {}
    """Field of the spec that sets a label of the pod, by label."""
    absent: Report
    """Report of a sidecar that does not answer."""
    quoted: ClassVar[Sequence[str]] = ()
    """Fields of the report with texts in which figures change often, such as free bytes."""

    # -- the pod

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """Edit the settings that are hashed, which are the declared fields by their Python names.

        By default, all fields of the feature are hashed, so that a change of any of them replaces pods.
        """

    def config(self, cluster: Cluster) -> Object:
        """Keys of the configuration file that all sidecars of the cluster share."""
        return {}

    def files(self, cluster: Cluster) -> dict[str, str]:
        """Further files next to the configuration file, which sidecars may follow."""
        return {}

    def env(self, cluster: Cluster) -> dict[str, str]:
        """Variables of the sidecar: options of this pod alone, which injected sidecars must not read."""
        return {}

    def volumes(self, cluster: Cluster) -> Iterable[Volume]:
        """Volumes of the pod, with the containers that mount them."""
        return ()

    def labels(self, cluster: Cluster) -> dict[str, str]:
        """Labels of the pod."""
        return {}

    def ports(self, cluster: Cluster) -> dict[str, int]:
        """Ports of the sidecar, by name. Only engine pods with the feature's labels may connect to them."""
        return {}

    def made(self, cluster: Cluster) -> Iterable[Object]:
        """Secrets that the operator creates and does not change, because it cannot read them."""
        return ()

    def for_injected_pods(self, spec: Spec) -> Spec:
        """The spec for pods with an injected sidecar, which may lack the feature."""
        return spec

    # -- the plan

    def referred(self, resource: Object) -> str:
        """Name of another LMCacheCluster that the feature uses; empty: none."""
        return ""

    def check_change(self, observed: Observed, live: Object | None) -> None:
        """Refuse a change that existing pods must not get. ``live``: their StatefulSet, if it exists.

        Raises:
            InvalidSpecError: the pods stay as they are.
        """

    def has_former_size(self, pod: Object, template: Object) -> bool:
        """Whether a pod that matches the spec keeps a size that differs from the template's."""
        return False

    def plan_fields(self, cluster: Cluster) -> Mapping[str, Any]:
        """Values of ``Plan.fields``, for ``steady_condition`` and ``status_fields``."""
        return {}

    # -- reports of sidecars

    def read(self, stats: Mapping[str, Any]) -> Report:
        """Parse a sidecar's report from its ``/stats``. Missing or invalid values get their defaults."""
        return self.absent

    def steady(self, report: Report, former: Report) -> Report:
        """The report, with the texts of the former one where only figures in them changed."""
        steady: Report = steady_texts(report, former, self.quoted)
        return steady

    def report(self, sidecar: SidecarState) -> Report:
        """The report of a sidecar on this feature."""
        report: Report = sidecar.features.get(self.name, self.absent)
        return report

    def is_present(self, sidecar: SidecarState) -> bool:
        """Whether a sidecar has this tier."""
        return False

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """The condition that follows from the sidecars' reports; None: none."""
        return None

    def steady_condition(self, observed: Observed, plan: Plan, *, is_silence: bool) -> Condition | None:
        """The condition, or the former one while reports are missing or uncertain.

        ``is_silence``: sidecars that answered before missed an answer, and may give the next one.
        """
        former = former_conditions(observed.resource, self.condition_type).get(self.condition_type)
        if observed.probed is None or is_silence:
            return former
        condition = self.condition(observed, observed.probed.sidecars)
        is_early = condition and condition.status == "Unknown" and not observed.probed.is_certain
        return former or condition if is_early else condition

    def status_fields(self, observed: Observed, plan: Plan) -> Object:
        """Fields of the cluster's status. Empty values are left out."""
        return {}


class HealthReport(NamedTuple):
    """A sidecar's report on a property that the spec does not set."""

    is_healthy: bool | None = None
    """Whether the sidecar has no problem; None: the property does not apply, or is unknown."""
    problem: str = ""


class HealthFeature(PodFeature[HealthReport]):
    """A property that the spec does not set, and that only a condition reports."""

    absent = HealthReport()
    quoted = ("problem",)
    success: ClassVar[tuple[Expected, str]]
    """Reason and message of the condition. The message has a place for the number of pods."""
    failure: ClassVar[tuple[Trouble, str]]
    """Reason of the condition, and what is wrong with the pods."""

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether no sidecar has the problem; None: the property applies to no sidecar."""
        reports = [(sidecar.pod, self.report(sidecar)) for sidecar in sidecars]
        number = sum(report.is_healthy is not None for _, report in reports)
        failed = [(pod, report.problem) for pod, report in reports if report.is_healthy is False]
        reason, message = self.success
        failure = failure_of(*self.failure, failed, number)
        return failure or (Condition("True", reason, message.format(number)) if number else None)


class TierReport(NamedTuple):
    """A sidecar's report on a lower tier. Values are counted since the sidecar started."""

    is_reachable: bool | None = None
    """Whether the tier is in use; None: no such tier, or unknown."""
    reason: str = ""
    """Why the tier is not in use."""
    used_bytes: int = 0
    """Bytes in use, of the remote tier on all servers together; 0: unknown."""
    evicted: int = 0
    """Values that the servers of the remote tier evicted."""


class LowerTierFeature(PodFeature[TierReport]):
    """The disk tier or the remote tier."""

    is_tier = True
    absent = TierReport()
    quoted = ("reason",)

    def read(self, stats: Mapping[str, Any]) -> TierReport:
        """Parse the tier's part of ``/stats``."""
        part = part_of(stats, self.name)
        is_reachable = part.get("is_reachable")
        counts = (count_of(part.get(name)) for name in ("used_bytes", "evicted"))
        is_known = isinstance(is_reachable, bool)
        return TierReport(is_reachable if is_known else None, reason_of(part, "off_reason"), *counts)

    def is_present(self, sidecar: SidecarState) -> bool:
        """Whether a sidecar has the tier."""
        return self.report(sidecar).is_reachable is not None

    def lost(self, sidecars: Sequence[SidecarState]) -> list[tuple[str, str]]:
        """Pods whose tier is not in use, and the reasons."""
        reports = ((sidecar.pod, self.report(sidecar)) for sidecar in sidecars)
        return [(pod, report.reason) for pod, report in reports if report.is_reachable is False]


def part_of(stats: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of ``/stats``; empty if it is missing or invalid."""
    part = stats.get(name)
    return part if isinstance(part, dict) else {}


def count_of(value: object) -> int:
    """A counter; 0 if it is missing or invalid."""
    return value if isinstance(value, int) and 0 <= value < _MAX_COUNT else 0


def reason_of(part: Mapping[str, Any], name: str) -> str:
    """A reason that a sidecar gives, never empty."""
    return plain(part.get(name)) or _SILENT


def steady_texts(report: Any, former: Any, fields: Iterable[str]) -> Any:
    """A report with the former text of each field in which only figures changed. It is reported once."""
    texts = {name: (getattr(report, name), getattr(former, name)) for name in fields}
    steady = {name: old for name, (new, old) in texts.items() if _FIGURE.sub("", new) == _FIGURE.sub("", old)}
    return report._replace(**steady) if steady else report


def secret_source(name: str, **keys: str | None) -> Object:
    """A Secret volume whose files have the operator's names, whatever names the user's keys have."""
    items = [{"key": key, "path": path} for path, key in keys.items() if key is not None]
    return {"secret": {"items": items, "secretName": name}}


def optional_files(name: str, *keys: str) -> Object:
    """A Secret volume with only these keys, which may be missing."""
    return {"secret": {"items": stateful.items(*keys), "optional": True, "secretName": name}}


def optional_list(owner: str, tier: str, key: str) -> Object:
    """A volume with only this key of the ConfigMap of a tier, which may be missing."""
    name = names.object_name(owner, tier)
    return {"configMap": {"items": stateful.items(key), "name": name, "optional": True}}
