"""Budgets for tenants: the file that sidecars follow, the Secrets with salts, condition and status. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import yaml

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tenants import DefaultTenant, TenantSpec, TenantsSpec, bytes_of
from lmcache_operator.components.engine.features.base import PodFeature, Volume, count_of, part_of
from lmcache_operator.components.figures import SHARE_POINTS, percent_of, steady_figures, summable
from lmcache_operator.contract.base import Observed, Plan, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of, former_conditions, silence_of
from lmcache_operator.specs import Object, paths
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain
from lmcache_store.tenant_names import MAX_NAMED

_PENDING_REASON: Final = "TenantsPending"
"""Reason of the condition while sidecars use a former file."""
_DIGEST: Final = "tenantsDigest"
"""Field of the plan with the digest of the declared file; None without tenants."""
_NAMES: Final = "tenantNames"
"""Field of the plan with the names of the declared tenants; empty without tenants."""
_PROBLEM: Final = "tenants_problem"
"""Key in the part of ``/stats``: a text, empty without a problem. Earlier sidecars have no such key."""
_NOT_REPORTED: Final = (
    "If no pods are being replaced, the image of the sidecar is too old: set spec.images.policy to Follow"
)
_PENDING: Final = (
    "The kubelet updates the file in running pods within two minutes. If it takes longer, check the node of "
    "the pod. If the node is Ready, delete the pod"
)


class TenantFigures(NamedTuple):
    """A sidecar's figures of one tenant. Tokens count since the sidecar started."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that the engine did not compute."""
    bytes: int = 0
    """Bytes that the tenant's rows take in memory now."""


class TenantsReport(NamedTuple):
    """A sidecar's report on its tenants."""

    digest: str | None = None
    """SHA-256 of the tenants file that the sidecar uses, in hexadecimal; empty: it could use none so far.
    None: it has no such file, or an earlier version, which does not report the digest."""
    problem: str = ""
    """Why the sidecar does not use all declared tenants."""
    figures: Mapping[str, TenantFigures] = MappingProxyType({})
    """Figures of tenants by name, which the spec may not declare. Empty: none were reported."""
    usable_bytes: int = 0
    """Bytes of the memory tier that rows can use; 0: unknown."""


class TenantBudgets(PodFeature[TenantsReport]):
    """Budgets of tenants in the tiers of an engine pod."""

    name = "tenants"
    condition_type = "TenantsKnown"
    awaited_reasons = (_PENDING_REASON, "NoAnswer")
    reserved: ClassVar[Mapping[str, str]] = {"LMCACHE_TENANTS_FILE": "tenants"}
    absent = TenantsReport()

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """Only the part that is in the pod. Sidecars follow changes of the file."""
        if (tenants := cluster.spec.tenants) is None:
            return
        secrets = [list(entry) for entry in tenants.salt_secrets]
        settings["tenants"] = {"header": tenants.header, "secrets": secrets}
        if tenants.header and cluster.spec.router is not None:
            settings["tenants"]["is_routed"] = True  # another middleware

    def config(self, cluster: Cluster) -> Object:
        """The path of the file."""
        return {"tenants_file": f"{paths.CONFIG_DIR}/{paths.TENANTS_FILE}"} if cluster.spec.tenants else {}

    def files(self, cluster: Cluster) -> dict[str, str]:
        """The file with all budgets. Sidecars follow its changes, so that new shares need no new pods."""
        tenants = cluster.spec.tenants
        return {paths.TENANTS_FILE: _file(tenants)} if tenants else {}

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """A volume with all salts. A missing Secret stops no engine: the sidecar reports it."""
        secrets = cluster.spec.tenants.salt_secrets if cluster.spec.tenants else ()
        sources = [
            {"secret": {"items": [{"key": key, "path": f"{name}/{key}"}], "name": name, "optional": True}}
            for name, key in secrets
        ]
        if sources:
            files = {"projected": {"sources": sources}}
            yield Volume("tenant-salts", paths.SALTS_DIR, files)

    def plan_fields(self, cluster: Cluster) -> Mapping[str, Any]:
        """Names of the tenants, and SHA-256 of the declared file, as sidecars report it."""
        names = cluster.spec.tenants.names if cluster.spec.tenants else ()
        text = self.files(cluster).get(paths.TENANTS_FILE)
        return {_NAMES: names, _DIGEST: text and hashlib.sha256(text.encode()).hexdigest()}

    def read(self, stats: Mapping[str, Any]) -> TenantsReport:
        """Parse the part of ``/stats`` about tenants. Its name differs between versions of the sidecar."""
        parts = (part for part in stats.values() if isinstance(part, dict))
        part: dict[str, Any] = next((part for part in parts if _PROBLEM in part), {})
        digest = part.get("tenants_digest")
        counts = [part_of(part, name) for name in TenantFigures._fields]
        # A valid report has at most one name per budget.
        names = islice(part_of(part, "bytes"), MAX_NAMED + 1)
        return TenantsReport(
            digest=plain(digest) if isinstance(digest, str) else None,
            problem=plain(part.get(_PROBLEM)),
            figures={name: TenantFigures(*(count_of(each.get(name)) for each in counts)) for name in names},
            usable_bytes=count_of(part_of(stats, "memory").get("usable_bytes")),
        )

    def steady_condition(self, observed: Observed, plan: Plan, *, is_silence: bool) -> Condition | None:
        """Whether the sidecars use the declared budgets.

        None: the spec has no tenants, or no sidecar runs. The former condition stays while the reports are
        missing or uncertain, or while the operator cannot plan, such as for an invalid spec.
        """
        if dig(observed.resource, "spec", "tenants") is None:
            return None
        former = former_conditions(observed.resource, self.condition_type).get(self.condition_type)
        if observed.probed is None:
            return former
        sidecars, is_certain = observed.probed
        reports = [(sidecar, self.report(sidecar)) for sidecar in sidecars]
        failed = [(sidecar.pod, report.problem) for sidecar, report in reports if report.problem]
        problem, number = "sidecars cannot use all of spec.tenants", sum(each.answers for each in sidecars)
        if invalid := failure_of("TenantsInvalid", problem, failed, number):
            return invalid
        digest = plan.fields.get(_DIGEST)
        if digest is None or not sidecars:
            return former if sidecars else None
        known = _judged(reports, digest)
        is_early = known.status == "Unknown" and not is_certain
        # A condition of an earlier spec says nothing about the present file.
        generation = observed.resource["metadata"].get("generation")
        is_of_spec = former is not None and former.generation == generation
        return former if is_early and is_of_spec else known

    def status_fields(self, observed: Observed, plan: Plan) -> Object:
        """``status.tenants``: hits and memory of each declared tenant, of all sidecars together.

        Sidecars may report other names than the spec has. The former list stays while the operator cannot
        plan, such as for an invalid spec.
        """
        listed: list[Object] = dig(observed.resource, "status", "tenants") or []
        names: Sequence[str] | None = plan.fields.get(_NAMES)
        if names is None:
            return {"tenants": listed}
        former = {entry["name"]: {key: entry[key] for key in entry if key != "name"} for entry in listed}
        reports = [report for sidecar in summable(observed) if (report := self.report(sidecar)).figures]
        if not names or not (reports or former):
            return {}
        # After a restart, a sidecar has no prompts of some tenants yet. Their former hits stay until then.
        current = {name: former.get(name, {}) | _of_tenant(reports, name) for name in names}
        figures = steady_figures(former, current, SHARE_POINTS)
        # The API server keeps the order of the list, so a different order would cause writes without end.
        ordered = sorted(figures, key=[*former, *names].index)
        return {"tenants": [{"name": name, **figures[name]} for name in ordered]}


def _file(tenants: TenantsSpec) -> str:
    default = _budget(tenants.default, min_percent=0)
    content = {"default": default, "named": [_entry(tenant) for tenant in tenants.named]}
    return str(yaml.safe_dump(content, sort_keys=False))


def _entry(tenant: TenantSpec) -> Object:
    ref = tenant.salt_secret_ref
    file = f"{paths.SALTS_DIR}/{ref.name}/{ref.key}" if ref else ""
    salt = {"saltFile": file} if ref else {"saltHash": tenant.salt_hash}
    return {"name": tenant.name, **salt, **_budget(tenant, tenant.min_memory_percent)}


def _budget(tenant: DefaultTenant | TenantSpec, min_percent: int) -> Object:
    return {
        "memoryPercent": tenant.memory_percent,
        "minMemoryPercent": min_percent,
        "lowerTierBytes": bytes_of(tenant.lower_tier_bytes),
        "priority": tenant.priority,
        # Earlier sidecars refuse a file with this key.
        **({} if tenant.retain_percent is None else {"retainPercent": tenant.retain_percent}),
    }


def _of_tenant(reports: Sequence[TenantsReport], name: str) -> Object:
    """The figures of one tenant that are known."""
    counted = [report.figures.get(name, TenantFigures()) for report in reports]
    shares = {
        "hitPercent": (sum(each.hit_tokens for each in counted), sum(each.prompt_tokens for each in counted)),
        "usedMemoryPercent": (
            sum(each.bytes for each in counted),
            sum(report.usable_bytes for report in reports),
        ),
    }
    return {field: percent_of(part, whole) for field, (part, whole) in shares.items() if whole}


_Reports = Sequence[tuple[SidecarState, TenantsReport]]


def _judged(reports: _Reports, digest: str) -> Condition:
    """The condition that follows from reports without problems. ``digest``: that of the declared file."""
    former = [(sidecar.pod, "") for sidecar, report in reports if report.digest not in (None, digest)]
    absent = [sidecar.pod for sidecar, _ in reports if not sidecar.answers]
    silent = [sidecar.pod for sidecar, report in reports if report.digest is None]
    total, outdated = len(reports), "sidecars do not use the declared tenants yet"
    unknown = "sidecars do not report which tenants they use"
    return (
        failure_of(_PENDING_REASON, outdated, former, total, _PENDING)
        or silence_of("NoAnswer", unknown, absent, total)
        or silence_of("NotReported", unknown, silent, total, _NOT_REPORTED)
        or Condition("True", "TenantsInUse", f"All {total} sidecars use the declared tenants.")
    )
