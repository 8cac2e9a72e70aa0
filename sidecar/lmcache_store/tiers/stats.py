"""Counters of the tiers: plain numbers that only rise from the start of the process.

Each counter is declared once, by ``counter`` or ``counters``, with a description for users. ``/stats``,
``/metrics`` and docs/reference/stats.md are made from the fields. Code counts with ``stats.hits += 1``.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.budgets import NO_SALT, Budget, Budgets

_MAX_CHAINS = 4096  # chains whose counted keys are remembered
_MAX_INVALID = 1024  # rows whose invalid objects are remembered
_MAX_REASONS = 32


def counter(about: str) -> Any:
    """Declare a number that only rises."""
    return field(default=0, metadata={"about": about})


def counters(label: str, about: str) -> Any:
    """Declare one number that only rises for each value of ``label``."""
    return field(default_factory=Counter, metadata={"about": about, "label": label})


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count by a reason from outside. After a number of different reasons, new ones count as ``other``."""
    is_few = reason in counts or len(counts) < _MAX_REASONS
    counts[reason if is_few else "other"] += 1


@dataclass(slots=True, eq=False)
class Account:
    """Rows and bytes in memory of all tenants that have one budget."""

    budget: Budget
    num_rows: int = 0
    num_bytes: int = 0
    """Bytes of the slots of these rows."""

    has_tenant_bounds: bool = False
    """Does the upper bound count for each tenant alone? True for tenants that are not named."""


@dataclass(slots=True)
class TenantUse:
    """Rows and bytes of one tenant in memory."""

    name: bytes
    num_rows: int = 0
    num_bytes: int = 0
    """Bytes of the slots of these rows."""

    account: Account = field(default_factory=lambda: Account(NO_SALT), compare=False)
    """Account of the tenant's budget, which counts these rows, too."""


class TenantUses:
    """Rows and bytes in use, by tenant. Requests without a salt belong to the tenant with an empty name."""

    def __init__(self, budgets: Budgets | None = None) -> None:
        self._uses: dict[bytes, TenantUse] = {}
        self.set_budgets(budgets or Budgets())

    def set_budgets(self, budgets: Budgets) -> None:
        """Use other budgets from now on. All uses get another account."""
        self.budgets = budgets
        self._accounts: dict[Budget, Account] = {}
        # Requests without a salt have an account for themselves, even if the default budget equals theirs.
        self._no_salt = Account(budgets.no_salt)
        self._uses.setdefault(b"", TenantUse(b""))
        for use in self._uses.values():
            use.account = self.account(use.name)
            use.account.num_rows += use.num_rows
            use.account.num_bytes += use.num_bytes

    def extend(self, budgets: Budgets) -> bool:
        """Use other budgets that differ only for tenants without rows; False: they differ for other tenants.

        The accounts stay as they are."""
        present = self.budgets
        is_extended = (
            budgets.default == present.default
            and budgets.has_limits == present.has_limits
            and all(budgets.by_tenant.get(name) == budget for name, budget in present.by_tenant.items())
            and all(budgets.of(name) == use.account.budget for name, use in self._uses.items())
        )
        if is_extended:
            self.budgets = budgets
        return is_extended

    def account(self, tenant: bytes) -> Account:
        """Return the account that counts this tenant's rows."""
        if not tenant:
            return self._no_salt
        budget = self.budgets.of(tenant)
        account = self._accounts.get(budget)
        if account is None:
            account = self._accounts[budget] = Account(budget)
            is_bounded = budget == self.budgets.default and budget.memory_percent < 100
            account.has_tenant_bounds = is_bounded
        return account

    @property
    def accounts(self) -> list[Account]:
        """Accounts of all budgets that have or had rows in memory."""
        return [self._no_salt, *self._accounts.values()]

    def enter(self, name: bytes, num_bytes: int) -> TenantUse:
        """Count a row. Returns its tenant's use, which the caller must pass to ``leave``."""
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = TenantUse(name, account=self.account(name))
        use.num_rows += 1
        use.num_bytes += num_bytes
        use.account.num_rows += 1
        use.account.num_bytes += num_bytes
        return use

    def leave(self, use: TenantUse, num_bytes: int) -> None:
        """Count a row out that left memory."""
        use.num_rows -= 1
        use.num_bytes -= num_bytes
        use.account.num_rows -= 1
        use.account.num_bytes -= num_bytes
        if use.name and not use.num_rows:
            del self._uses[use.name]

    def num_bytes(self, name: bytes) -> int:
        """Return the bytes that a tenant has in memory."""
        use = self._uses.get(name)
        return use.num_bytes if use else 0

    def largest(self, limit: int = 32) -> tuple[list[TenantUse], TenantUse]:
        """Return the uses of the largest tenants, the largest first, and the total of all other tenants."""
        uses = sorted(self._uses.values(), key=lambda use: use.num_bytes, reverse=True)
        remaining = TenantUse(b"other")
        for use in uses[limit:]:
            remaining.num_rows += use.num_rows
            remaining.num_bytes += use.num_bytes
        return [replace(use) for use in uses[:limit] if use.num_rows], remaining


class Removal(enum.Enum):
    """Reason why an object left a tier; a label of the removal counters."""

    EVICTED = "evicted"  # capacity: the policy chose it
    QUOTA = "quota"  # its tenant stored another row and had used up its quota
    INVALID = "invalid"  # wrong checksum, length, version or key


@dataclass
class TenantCounts:
    """Counters by the name of the tenants' budget. ``lmcache_sidecar.pages.tenant_stats`` shows them."""

    evicted: Counter[str] = field(default_factory=Counter)
    """Rows evicted for capacity or for an upper bound."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reservations refused because the tenant could evict no row."""
    disk_refused: Counter[str] = field(default_factory=Counter)
    """Rows not written to disk because of the tenant's bound there."""


@dataclass
class MemoryStats:
    """Counters of rows. A key counts once per request, by the first lookup of it."""

    hits: int = counter(
        "Rows (with several KV groups: chunks) that lookups found in memory or in the engine's own cache"
    )
    misses: int = counter("Rows that lookups did not find in memory, even if they were promoted afterwards")
    refused: int = counter("Reservations refused because no row could be freed")
    removed: Counter[Removal] = counters(
        "reason", "Rows that left memory: evicted, evicted for their tenant's quota, or invalid"
    )
    verified: int = counter("Rows from before a restart whose checksum was correct at their first use")
    tenants: TenantUses = field(default_factory=TenantUses)
    """Tenants that have rows in memory now."""
    tenant_counts: TenantCounts = field(default_factory=TenantCounts)
    """Counters by the name of the tenants' budget."""
    _counted: Recent[Hashable, int] = field(default_factory=lambda: Recent(_MAX_CHAINS))
    """Number of keys that were counted already, by chain."""

    def count_lookup(self, request: Hashable, keys: Sequence[bytes], num_resident: int) -> None:
        """Count a lookup. Engines repeat lookups while rows are promoted: only new keys of a chain count."""
        chain = (request, *keys[:1])
        num_counted = self._counted.get(chain, 0)
        self.hits += max(0, num_resident - num_counted)
        self.misses += max(0, len(keys) - max(num_resident, num_counted))
        self._counted[chain] = max(len(keys), num_counted)


class WriteSkipped(enum.Enum):
    """Reason why a row is not (yet) in a lower tier; a label of the write counters."""

    REFUSED = "refused"  # by the tier, for example a full one; tried again later
    BOUND = "bound"  # the tenant's bound in the tier is reached; not tried again
    DROPPED = "dropped"  # the queue was full, or the arena got another format
    EVICTED = "evicted"  # left the memory tier before its turn
    FAILED = "failed"  # an error; the log has the details
    INVALIDATED = "invalidated"  # overwritten in memory, and removed there


@dataclass
class TieredStats:
    """Counters of the traffic between memory and one lower tier, in rows."""

    written: int = counter("Rows written through to the tier, or already present in it")
    writes_skipped: Counter[WriteSkipped] = counters("reason", "Rows that were not written (yet)")
    promoted: int = counter("Rows loaded from the tier into memory")
    promotions_failed: int = counter("Rows not promoted: missing, invalid, memory full, or tier unavailable")
    skipped_slower_than_recompute: int = counter(
        "Rows not promoted, because computing them was estimated to be faster"
    )


@dataclass
class ObjectStats:
    """Counters of objects (one column of one row) in one lower tier."""

    hits: int = counter("Objects (one column of a row) that were loaded intact")
    misses: int = counter("Objects that were requested, but not in the tier")
    stored: int = counter("Objects written")
    touched: int = counter("Objects already in the tier that were marked as recently used")
    refused: Counter[str] = counters("reason", "Objects that the tier refused, by error")
    invalid: Counter[str] = counters("reason", "Objects that were damaged or of another format, by cause")
    key_absent: int = counter(
        "Objects that could not be decrypted, because their key version is absent; they also count as misses"
    )
    failures: int = counter("Operations that found the tier unavailable")
    evicted: int = counter("Objects evicted for capacity; for servers, all evicted values, of any client")
    _invalid_rows: Recent[bytes, None] = field(default_factory=lambda: Recent(_MAX_INVALID))
    """Rows with objects that were found invalid recently."""

    def note_invalid(self, row_key: bytes, reason: str) -> None:
        """Count an invalid object of a row."""
        count_reason(self.invalid, reason)
        self._invalid_rows[row_key] = None

    def take_invalid(self, row_key: bytes) -> bool:
        """Was an object of this row found invalid since the last call?"""
        return self._invalid_rows.pop(row_key, self) is None
