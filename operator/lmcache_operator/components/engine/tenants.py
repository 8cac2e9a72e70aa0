"""Budgets for tenants: the file that sidecars follow, the Secrets with salts, and the condition. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import yaml

from lmcache_operator.api.tenants import Tenant, Tenants
from lmcache_operator.contract.base import Observed, Sidecar
from lmcache_operator.contract.conditions import Condition, Reason, former_conditions
from lmcache_operator.specs import Object, paths
from lmcache_operator.specs.merge import dig

TENANTS_KNOWN: Final = "TenantsKnown"
"""Type of the condition."""
TENANTS_PENDING: Final = "TenantsPending"
"""Reason of the condition while sidecars use a former file."""
AWAITED_REASONS: Final = (TENANTS_PENDING, "NoAnswer")
"""Reasons of the condition that end without a change of any object. Later probes show when."""
DIGEST_FIELD: Final = "tenantsDigest"
"""Field of the plan with the digest of the declared file."""
NAMES_FIELD: Final = "tenantNames"
"""Field of the plan with the names of the declared tenants; empty without tenants."""
_NOT_REPORTED: Final = (
    "If no pods are being replaced, the image of the sidecar is too old: set spec.images.policy to Follow"
)
_PENDING: Final = (
    "The kubelet updates the file in running pods within two minutes. If it takes longer, check the node of "
    "the pod. If the node is Ready, delete the pod"
)


def tenants_yaml(tenants: Tenants) -> str:
    """The file with all budgets. Sidecars follow its changes, so that new shares need no new pods."""
    default: Object = {
        "memoryPercent": tenants.default.memory_percent,
        "minMemoryPercent": 0,
        "lowerTierBytes": tenants.default.disk_bytes,
        "priority": tenants.default.priority,
    }
    content = {"default": default, "named": [_entry(tenant) for tenant in tenants.named]}
    return str(yaml.safe_dump(content, sort_keys=False))


def tenants_digest(tenants: Tenants | None) -> str | None:
    """SHA-256 of the declared file, as sidecars report it; None without tenants."""
    if tenants is None:
        return None
    return hashlib.sha256(tenants_yaml(tenants).encode()).hexdigest()


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


def tenants_known(observed: Observed, digest: str | None) -> Condition | None:
    """Whether the sidecars use the declared budgets.

    Args:
        observed: The cluster, with the reports of its sidecars.
        digest: SHA-256 of the declared file; None: the operator could not plan, such as for an invalid spec.

    Returns:
        The condition; None: the spec has no tenants, or no sidecar runs. The former condition stays while
        the reports are missing or uncertain.
    """
    if dig(observed.resource, "spec", "tenants") is None:
        return None
    former = former_conditions(observed.resource, TENANTS_KNOWN).get(TENANTS_KNOWN)
    if observed.probed is None:
        return former
    sidecars, is_certain = observed.probed
    if invalid := _invalid(sidecars):
        return invalid
    if digest is None or not sidecars:
        return former if sidecars else None
    known = _outdated(sidecars, digest) or _unknown(sidecars)
    if known is None:
        message = f"All {len(sidecars)} sidecars use the declared tenants."
        return Condition("True", "TenantsInUse", message)
    is_early = known.status == "Unknown" and not is_certain
    # A condition of an earlier spec says nothing about the present file.
    is_of_spec = former is not None and former.generation == observed.resource["metadata"].get("generation")
    return former if is_early and is_of_spec else known


def _invalid(sidecars: Sequence[Sidecar]) -> Condition | None:
    """The condition if a sidecar reports a problem."""
    answering = [sidecar for sidecar in sidecars if sidecar.answers]
    failed = [sidecar for sidecar in answering if sidecar.tenants_problem]
    if not failed:
        return None
    count = f"{len(failed)} of {len(answering)} sidecars cannot use all of spec.tenants"
    why = f"pod {failed[0].pod}: {failed[0].tenants_problem}"
    return Condition("False", "TenantsInvalid", f"{count}. First: {why}")


def _outdated(sidecars: Sequence[Sidecar], digest: str) -> Condition | None:
    """The condition if a sidecar uses another file than the declared one."""
    former = [sidecar for sidecar in sidecars if sidecar.tenants_digest not in (None, digest)]
    if not former:
        return None
    count = f"{len(former)} of {len(sidecars)} sidecars do not use the declared tenants yet"
    return Condition("False", TENANTS_PENDING, f"{count}. First: pod {former[0].pod}. {_PENDING}")


def _unknown(sidecars: Sequence[Sidecar]) -> Condition | None:
    """The condition if a sidecar does not report its file, such as one that does not answer."""
    absent = [sidecar for sidecar in sidecars if not sidecar.answers]
    silent = absent or [sidecar for sidecar in sidecars if sidecar.tenants_digest is None]
    if not silent:
        return None
    reason: Reason = "NoAnswer" if absent else "NotReported"
    remedy = "See the condition SidecarAttached" if absent else _NOT_REPORTED
    count = f"{len(silent)} of {len(sidecars)} sidecars do not report which tenants they use"
    return Condition("Unknown", reason, f"{count}. First: pod {silent[0].pod}. {remedy}")
