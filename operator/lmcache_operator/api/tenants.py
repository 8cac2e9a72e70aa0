"""Budgets for tenants in the spec of an LMCacheCluster.

A tenant is all requests with the same ``cache_salt``. The spec names a salt by its hash or by a Secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import NAME, needs_engine, size_between
from lmcache_operator.api.router import CACHE_AWARE
from lmcache_store.common.units import parse_quantity
from lmcache_store.tenant_names import DEFAULT_NAME, MAX_CHARACTERS, MAX_NAMED, PATTERN

NO_LIMIT_PERCENT = 100
_MAP_BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
_PRIORITY: dict[str, Any] = {"default": 0, "minimum": -100, "maximum": 100}
_PRIORITY_MEANING = "If the memory tier is full, rows of a lower priority are evicted first."
_RETAINED: dict[str, Any] = {"minimum": 0, "maximum": 100}
_RETAINED_MEANING = (
    "Per cent of memoryPercent in which hints may retain rows that would be evicted otherwise. 0: hints "
    "retain nothing. Default: "
)
_LOWER_TIER_MEANING = "Bytes of a pod's disk tier that one tenant may use, such as 100Gi. Default: no limit."
# The sidecars' file has 0 for no limit.
_LOWER_TIER_BOUNDS = "1", "1024Ti"


class SaltSecretRef(Part):
    """A key of a Secret in the same namespace, with the salt of one tenant."""

    name: str = field("Name of the Secret, in the same namespace.", **NAME)
    key: str = field(
        "Key of the salt in the Secret.",
        default="salt",
        maxLength=253,
        # The kubelet refuses a file whose name begins with two dots.
        pattern=r"^[-_a-zA-Z0-9][-._a-zA-Z0-9]*$",
    )


class DefaultTenant(Part):
    """The budget of each salt that has no entry in ``named``."""

    memory_percent: int = field(
        "Per cent of the memory tier that one such salt may use. At this bound, it evicts its own rows. "
        "Requests without a cache_salt have no bound. 100: no bound.",
        default=NO_LIMIT_PERCENT,
        minimum=1,
        maximum=100,
    )
    lower_tier_bytes: str | None = field(
        _LOWER_TIER_MEANING, **size_between("tenants.default.lowerTierBytes", *_LOWER_TIER_BOUNDS)
    )
    priority: int = field(_PRIORITY_MEANING, **_PRIORITY)
    retain_percent: int | None = field(_RETAINED_MEANING + "that of tiers.memory.", **_RETAINED)


# Sidecars count the salts without an entry by this name.
_NOT_DEFAULT = Rule(
    f"self != '{DEFAULT_NAME}'",
    f"{DEFAULT_NAME} is the name of all salts without an entry: use tenants.default, or another name",
    lambda name: name != DEFAULT_NAME,
)


class TenantSpec(Part):
    """The budget of one tenant."""

    RULES = (
        Rule(
            "has(self.saltHash) != has(self.saltSecretRef)",
            "exactly one of saltHash and saltSecretRef must be set",
            lambda tenant: (tenant.salt_hash is None) != (tenant.salt_secret_ref is None),
        ),
        Rule(
            "self.minMemoryPercent <= self.memoryPercent",
            "minMemoryPercent must be at most memoryPercent: lower it, or raise memoryPercent",
            lambda tenant: tenant.min_memory_percent <= tenant.memory_percent,
        ),
    )

    name: str = field(
        "Name of the tenant in metrics, status and messages. It is no secret.",
        maxLength=MAX_CHARACTERS,
        pattern=f"^{PATTERN}$",
        rules=(_NOT_DEFAULT,),
    )
    salt_hash: str | None = field(
        "Hash of the tenant's salt, as `lmcache-sidecar salt-hash` prints it.",
        maxLength=64,
        pattern=r"^[0-9a-f]{64}$",
    )
    salt_secret_ref: SaltSecretRef | None = field(
        "Secret with the tenant's salt. Only the sidecars read it, and they follow its changes. Another name "
        "or key replaces the pods, one at a time."
    )
    memory_percent: int = field(
        "Per cent of the memory tier that the tenant may use. At its limit, it evicts its own rows. 100: no "
        "limit.",
        default=NO_LIMIT_PERCENT,
        minimum=1,
        maximum=100,
    )
    min_memory_percent: int = field(
        "Per cent of the memory tier that no other tenant can take from this one.",
        default=0,
        minimum=0,
        maximum=100,
    )
    lower_tier_bytes: str | None = field(
        _LOWER_TIER_MEANING, **size_between("tenants.named[].lowerTierBytes", *_LOWER_TIER_BOUNDS)
    )
    priority: int = field(_PRIORITY_MEANING, **_PRIORITY)
    retain_percent: int | None = field(_RETAINED_MEANING + "that of tenants.default.", **_RETAINED)


def _are_distinct(values: Sequence[object]) -> bool:
    """Whether no value other than None occurs twice."""
    given = [value for value in values if value is not None]
    return len(given) == len(set(given))


_NO_HASH, _NO_SECRET = "!has(a.saltHash)", "!has(a.saltSecretRef)"
_SAME_HASH = "has(b.saltHash) && b.saltHash == a.saltHash"
_SAME_SECRET = (
    "has(b.saltSecretRef) && b.saltSecretRef.name == a.saltSecretRef.name && "
    "b.saltSecretRef.key == a.saltSecretRef.key"
)
_NAMED_RULES = (
    # The API server refuses equal names by the list's type. Its message names the entry.
    Rule(
        None,
        "two tenants have one name: give each tenant its own name",
        lambda named: _are_distinct([tenant.name for tenant in named]),
    ),
    Rule(
        f"self.all(a, {_NO_HASH} || self.exists_one(b, {_SAME_HASH}))",
        "two tenants have the same saltHash: give each tenant its own salt, or remove one of them",
        lambda named: _are_distinct([tenant.salt_hash for tenant in named]),
    ),
    Rule(
        f"self.all(a, {_NO_SECRET} || self.exists_one(b, {_SAME_SECRET}))",
        "two tenants have the same saltSecretRef: give each tenant its own salt, or remove one of them",
        lambda named: _are_distinct([tenant.salt_secret_ref for tenant in named]),
    ),
    Rule(
        "self.map(t, t.minMemoryPercent).sum() <= 100",
        "the sum of minMemoryPercent over all tenants must be at most 100: lower some of them",
        lambda named: sum(tenant.min_memory_percent for tenant in named) <= NO_LIMIT_PERCENT,
    ),
)


class TenantsSpec(Part):
    """Budgets for tenants. A tenant is all requests with the same cache_salt."""

    header: bool = field(
        "Whether vLLM takes the salt of a request from the header X-LMCache-Tenant, which your gateway sets. "
        "The gateway must remove this header from requests of clients. Not with engine.prefill, whose router "
        "drops the header. Needs a sidecar image of the operator's version or later. A change replaces the "
        "pods, one at a time.",
        default=False,
    )
    default: DefaultTenant = field("Budget of each salt that has no entry in named.", default={})
    named: list[TenantSpec] = field(
        "Tenants with a budget of their own. Changes of shares replace no pods.",
        default=[],
        maxItems=MAX_NAMED,
        rules=_NAMED_RULES,
        **_MAP_BY_NAME,
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tenants as sidecars count them, that of all salts without an entry first."""
        return (DEFAULT_NAME, *(tenant.name for tenant in self.named))

    @property
    def salt_secrets(self) -> list[tuple[str, str]]:
        """Name and key of each Secret entry with a salt, in order."""
        refs = (tenant.salt_secret_ref for tenant in self.named)
        return sorted({(ref.name, ref.key) for ref in refs if ref is not None})


class TenantStatus(Part):
    """Hits and memory of one tenant in all engine pods together. Prefill pods count in their own object."""

    name: str = field(
        f"Name of the tenant; {DEFAULT_NAME}: all salts without an entry, and requests without a salt.",
        maxLength=MAX_CHARACTERS,
    )
    hit_percent: int | None = field(
        "Hits in per cent of the tenant's prompt tokens, since the pods started. After a restart, the last "
        "figure stays until the tenant has a prompt. Absent before its first prompt."
    )
    used_memory_percent: int | None = field(
        "Memory that the tenant's rows take, in per cent of all memory tiers. The last figure stays while no "
        "sidecar reports one."
    )


TENANTS_STATUS: dict[str, Any] = {"maxItems": MAX_NAMED + 1, **_MAP_BY_NAME}
"""Keywords of the list in the status."""


def bytes_of(size: str | None) -> int:
    """Bytes of a pod's disk tier that a tenant may use; 0: no limit."""
    return 0 if size is None else int(parse_quantity(size))


_NO_TENANTS = "!has(self.tenants)"
# Policies that know nothing of prompts. CacheAware separates prompts by the salt in the body, and ignores the
# header. ConsistentHash sends equal prompts to one engine, whatever their salt.
_BY_LOAD = "PowerOfTwo", "RoundRobin"
_POOL_POLICY = "^--(prefill|decode)[-_]p"
SPEC_RULES = (
    needs_engine("tenants", "set tenants at the clusters that have engines"),
    Rule(
        f"{_NO_TENANTS} || !self.tenants.header || !has(self.engine) || !has(self.engine.prefill)",
        "vLLM's router drops the header with engine.prefill: remove tenants.header, and let the gateway "
        "replace cache_salt in the body",
        lambda spec: not (spec.tenants and spec.tenants.header and spec.engine and spec.engine.prefill),
    ),
    Rule(
        f"{_NO_TENANTS} || !has(self.router) || self.router.policy in {[*_BY_LOAD]} || "
        f"(self.router.policy == '{CACHE_AWARE}' && !self.tenants.header)",
        f"with tenants, router.policy must be {' or '.join(_BY_LOAD)}, or {CACHE_AWARE} without "
        "tenants.header. Others publish salts, or let response times depend on other tenants' prompts",
        lambda spec: (
            not (spec.tenants and spec.router)
            or spec.router.policy in _BY_LOAD
            or (spec.router.policy == CACHE_AWARE and not spec.tenants.header)
        ),
    ),
    Rule(
        f"{_NO_TENANTS} || !has(self.router) || !self.router.args.exists(a, a.matches('{_POOL_POLICY}'))",
        "with tenants, router.args must not set the policy of one pool: use router.policy for both pools",
        lambda spec: (
            not (spec.tenants and spec.router)
            or not any(re.match(_POOL_POLICY, argument) for argument in spec.router.args)
        ),
    ),
)
"""Rules of the whole spec."""
