"""Budgets of tenants: how many bytes the rows of a tenant may take, and how many it is guaranteed. Pure.

A tenant of the wire is a hash of a cache salt and a namespace (``lmcache_store.keys.tenant``). A budget has a
name. Several tenants of the wire may share a budget, because one salt has a different hash in each namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lmcache_store import keys
from lmcache_store.tenant_names import DEFAULT_NAME


def short_tenant(tenant: bytes) -> bytes:
    """Return the part of a tenant of the wire that the arena records, without zero bytes at its end.

    The sidecar knows tenants only by this part. Different tenants agree in it once in 2**64.
    """
    return tenant[:8].rstrip(b"\0")


@dataclass(frozen=True)
class Budget:
    """Limits of a tenant. Percentages are of the usable slots of the memory tier."""

    name: str = DEFAULT_NAME
    memory_percent: int = 100
    """Upper bound. At this bound, a tenant evicts its own rows. 100 means no bound."""
    min_memory_percent: int = 0
    """Guaranteed share. Stores of other tenants evict no rows of a tenant that uses at most this share."""
    disk_bytes: int = 0
    """Bytes that the tenant's rows may take in the disk tier of this pod; 0: no bound."""
    priority: int = 0
    """Rows of lower priority are evicted first."""
    retain_percent: int = 25
    """Part of ``memory_percent`` in which hints retain rows that would be evicted otherwise; 0: none."""


NO_SALT = Budget()
"""Budget of rows without a tenant. They are not limited and not protected."""


@dataclass(frozen=True)
class Budgets:
    """Budgets by tenant. Without arguments, all rows are equal."""

    default: Budget = Budget()
    """Budget of each tenant that is not named. The upper bounds are for each of them, the guaranteed share is
    for all of them together."""
    by_tenant: Mapping[bytes, Budget] = field(default_factory=dict)
    """Budgets of named tenants."""
    salt_hashes: Mapping[bytes, bytes] = field(default_factory=dict)
    """Hashes of the salts of named tenants, by tenant. One salt has several tenants of the wire."""
    no_salt: Budget = NO_SALT
    """Budget of requests without a salt."""

    def of(self, tenant: bytes) -> Budget:
        """Return the budget of a tenant; ``tenant`` is empty for requests without a salt."""
        return self.by_tenant.get(tenant, self.default) if tenant else self.no_salt

    def owner(self, tenant: bytes) -> str:
        """Return the name under which bytes on disk count. It does not depend on the name of the budget."""
        return self.salt_hashes.get(tenant, tenant).hex()

    @property
    def has_limits(self) -> bool:
        """Do evictions depend on tenants?"""
        plain = Budget()
        return replace(self.default, retain_percent=plain.retain_percent) != plain or any(
            (budget.memory_percent, budget.min_memory_percent, budget.priority)
            != (plain.memory_percent, plain.min_memory_percent, plain.priority)
            for budget in self.by_tenant.values()
        )


@dataclass(frozen=True)
class SaltedBudgets:
    """Budgets by the hash of a salt, as users write them. They are the same for all namespaces."""

    default: Budget = Budget()
    by_salt_hash: Mapping[bytes, Budget] = field(default_factory=dict)
    no_salt: Budget = NO_SALT

    def resolve(self, namespaces: Iterable[bytes]) -> Budgets:
        """Return the budgets of the tenants of these namespaces."""
        salt_hashes = {
            short_tenant(keys.tenant_of_hash(salt_hash, namespace)): salt_hash
            for namespace in namespaces
            for salt_hash in self.by_salt_hash
        }
        by_tenant = {tenant: self.by_salt_hash[salt_hash] for tenant, salt_hash in salt_hashes.items()}
        return Budgets(self.default, by_tenant, salt_hashes, self.no_salt)

    @property
    def names_by_owner(self) -> dict[str, str]:
        """Names of budgets, by the names under which bytes on disk count (``Budgets.owner``)."""
        return {salt_hash.hex(): budget.name for salt_hash, budget in self.by_salt_hash.items()}

    @property
    def listed(self) -> list[Budget]:
        """All budgets, the default's first."""
        return [self.default, *self.by_salt_hash.values()]
