"""Budgets for tenants: the file that sidecars follow, the Secrets with salts, and the condition. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from lmcache_operator.api.tenants import Tenant, Tenants, memory_percent_of_default
from lmcache_operator.components.base import Sidecar
from lmcache_operator.components.conditions import Condition
from lmcache_operator.specs import Object, paths

TENANTS_KNOWN = "TenantsKnown"
"""Type of the condition."""


def tenants_yaml(tenants: Tenants, tenant_quota_percent: int) -> str:
    """The file with all budgets. Sidecars follow its changes, so that new shares need no new pods."""
    default: Object = {
        "memoryPercent": memory_percent_of_default(tenants, tenant_quota_percent),
        "minMemoryPercent": 0,
        "lowerTierBytes": tenants.default.disk_bytes,
        "priority": tenants.default.priority,
    }
    content = {"default": default, "named": [_entry(tenant) for tenant in tenants.named]}
    return str(yaml.safe_dump(content, sort_keys=False))


def _entry(tenant: Tenant) -> Object:
    ref = tenant.salt_secret_ref
    salt = {"saltHash": tenant.salt_hash} if ref is None else {"saltFile": _salt_file(ref.name, ref.key)}
    return {
        "name": tenant.name,
        **salt,
        "memoryPercent": tenant.memory_percent,
        "minMemoryPercent": tenant.min_memory_percent,
        "lowerTierBytes": tenant.disk_bytes,
        "priority": tenant.priority,
    }


def _salt_file(secret: str, key: str) -> str:
    return f"{paths.SALTS_DIR}/{secret}/{key}"


def salts_volume(tenants: Tenants) -> Object | None:
    """Volume with all salts; None: no tenant has a Secret.

    Each Secret is optional. If it is missing, the engine runs, and the sidecar reports the problem.
    """
    sources = [
        {"secret": {"items": [{"key": key, "path": f"{name}/{key}"}], "name": name, "optional": True}}
        for name, key in tenants.salt_secrets
    ]
    return {"projected": {"sources": sources}} if sources else None


def in_spec_hash(tenants: Tenants) -> Object:
    """The part of the settings that is in the pod, and not in the file: a change of it replaces pods."""
    return {"header": tenants.header, "secrets": [list(entry) for entry in tenants.salt_secrets]}


def tenants_known(sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether the sidecars use the declared budgets; None: no sidecar answers."""
    answering = [sidecar for sidecar in sidecars if sidecar.answers]
    if failed := [sidecar for sidecar in answering if sidecar.tenants_problem]:
        first = f"pod {failed[0].pod}: {failed[0].tenants_problem}"
        message = f"{len(failed)} of {len(answering)} sidecars cannot use all of spec.tenants. First: {first}"
        return Condition("False", "TenantsInvalid", message)
    if silent := [sidecar for sidecar in answering if not sidecar.reports_tenants]:
        count = (
            f"{len(silent)} of {len(answering)} sidecars do not report tenants. First: pod {silent[0].pod}"
        )
        remedy = (
            "If no pods are being replaced, create injected pods again. If the image is too old, set "
            "spec.images.policy to Follow"
        )
        return Condition("Unknown", "NotReported", f"{count}. {remedy}")
    if not answering:
        return None
    count = "All" if len(answering) == len(sidecars) else f"{len(answering)} of"
    return Condition("True", "TenantsInUse", f"{count} {len(sidecars)} sidecars use the declared tenants.")
