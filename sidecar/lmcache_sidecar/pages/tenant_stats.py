"""Statistics of tenants, by the names of their budgets. They contain no salts and no hashes.

The number of names is bounded, because the tenants file names them. All tenants without an entry, and
requests without a salt, have the name ``default`` together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_sidecar.explain.causes import CauseStats
from lmcache_sidecar.files.tenants import TenantsFile
from lmcache_sidecar.pages.stats import Figure, StatsPart, read, slot_bytes
from lmcache_store.causes import num_computed
from lmcache_store.tenant_names import DEFAULT_NAME
from lmcache_store.tiers.base import BoundedTier
from lmcache_store.tiers.budgets import Budget
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import MemoryStats

_NO_CAUSES: Mapping[str, CauseStats] = {}


class Counted(NamedTuple):
    """The budgets, the counters by their names, and the causes of prompt tokens by name."""

    budgets: list[Budget]
    counts: MemoryStats
    causes: Mapping[str, CauseStats]


class Shares(NamedTuple):
    """The budgets, and the memory tier of which they are shares."""

    budgets: list[Budget]
    memory: MemoryTier


class DiskBounds(NamedTuple):
    """The budgets with a bound on disk, the counters by name, and the tier."""

    budgets: list[Budget]
    names: Mapping[str, str]
    """Names of budgets by the owners of bytes on disk."""
    counts: MemoryStats
    disk: BoundedTier


def _in_memory(counted: Counted, number: str) -> dict[str, int]:
    """Return a number of all rows in memory, by the name of their budget."""
    sums = Counter[str]()
    for account in counted.counts.tenants.accounts:
        sums[account.budget.name] += getattr(account, number)
    return _by_name(counted, sums)


def _by_name(source: Counted | DiskBounds, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of the tenants that the file names now."""
    return {budget.name: numbers.get(budget.name, 0) for budget in source.budgets}


def _hit_tokens(causes: Mapping[str, CauseStats]) -> dict[str, int]:
    return {name: stats.prompt_tokens - num_computed(stats.cause_tokens) for name, stats in causes.items()}


def _share(shares: Shares, percentage: str) -> dict[str, int]:
    """Return percentages of the usable memory in bytes, rounded down to slots as the memory tier does."""
    usable, num_bytes = shares.memory.usable_slots, slot_bytes(shares.memory.arena)
    return {
        budget.name: usable * int(getattr(budget, percentage)) // 100 * num_bytes for budget in shares.budgets
    }


def _on_disk(bounds: DiskBounds) -> dict[str, int]:
    """Return the bytes on disk by name. Owners that have no name are tenants of the default budget."""
    sums = Counter[str]()
    for owner, num_bytes in bounds.disk.bytes_by_owner().items():
        sums[bounds.names.get(owner, DEFAULT_NAME)] += num_bytes
    return _by_name(bounds, sums)


# fmt: off
COUNTED: tuple[Figure[Counted], ...] = (
    Figure("rows", "Rows in memory, by the name of the tenant; default: all tenants that are not named",
        lambda counted: _in_memory(counted, "num_rows"), "tenant"),
    Figure("bytes", "Bytes of rows", lambda counted: _in_memory(counted, "num_bytes"), "tenant"),
    Figure("evictions", "Rows that left memory for capacity or an upper bound, by the tenant of the row",
        lambda counted: _by_name(counted, counted.counts.tenant_counts.evicted), "tenant", is_counter=True),
    Figure("refused", "Reservations in memory refused because no row could be freed for the tenant",
        lambda counted: _by_name(counted, counted.counts.tenant_counts.refused), "tenant", is_counter=True),
    Figure("prompt_tokens", "Tokens of prompts that engines scheduled, by tenant",
        lambda counted: _by_name(counted, {name: c.prompt_tokens for name, c in counted.causes.items()}),
        "tenant", is_counter=True),
    Figure("hit_tokens", "The same tokens, without those that engines computed",
        lambda counted: _by_name(counted, _hit_tokens(counted.causes)), "tenant", is_counter=True),
)
SHARES: tuple[Figure[Shares], ...] = (
    Figure("guaranteed_bytes", "Guaranteed share of bytes, of which no other tenant can evict rows; 0: none",
        lambda shares: _share(shares, "min_memory_percent"), "tenant"),
    Figure("bound_bytes", "Upper bound of bytes; for default, the bound of each salt that is not named",
        lambda shares: _share(shares, "memory_percent"), "tenant"),
)
DISK: tuple[Figure[DiskBounds], ...] = (
    Figure("disk_bytes", "Bytes on disk, for tenants with a bound there: objects that were written since this"
        " sidecar knows the bound", _on_disk, "tenant"),
    Figure("disk_bound_bytes", "Upper bound of disk_bytes; for default, the bound of each salt that is not"
        " named", lambda bounds: {budget.name: budget.disk_bytes for budget in bounds.budgets}, "tenant"),
    Figure("disk_refused", "Rows not written to disk because of the tenant's bound",
        lambda bounds: _by_name(bounds, bounds.counts.tenant_counts.disk_refused), "tenant",
        is_counter=True),
)
# fmt: on
TENANTS: tuple[Figure[Any], ...] = (*COUNTED, *SHARES, *DISK)
"""All figures. Those of ``DISK`` exist for tenants with a bound on disk."""


def tenants_part(
    file: TenantsFile,
    counts: MemoryStats,
    causes: Mapping[str, CauseStats] = _NO_CAUSES,
    memory: MemoryTier | None = None,
    disk: object = None,
) -> StatsPart:
    """Return the statistics of tenants by the names of their budgets. Never contains salts or their hashes.

    ``tenants_problem`` and ``tenants_digest`` are None without a file: budgets that no file declares have no
    problem. The operator compares the digest with that of the file that it wrote.

    Args:
        file: the tenants file.
        counts: counters of the memory tier.
        causes: causes of prompt tokens by name.
        memory: the memory tier; None until it has a format.
        disk: the disk tier; None: the sidecar has no disk.
    """
    budgets, has_file = file.salted.listed, bool(file.path)
    facts = {
        "tenants_problem": file.problem if has_file else None,
        "tenants_digest": file.digest if has_file else None,
        "causes": {budget.name: _causes(causes[budget.name]) for budget in budgets if budget.name in causes},
    }
    bounded = [budget for budget in budgets if budget.disk_bytes]
    figures = read(COUNTED, Counted(budgets, counts, causes))
    figures |= read(SHARES, Shares(budgets, memory) if memory is not None else None)
    if isinstance(disk, BoundedTier):
        figures |= read(DISK, DiskBounds(bounded, file.salted.names_by_owner, counts, disk))
    return StatsPart("tenants", facts, figures, "lmcache_tenant")


def _causes(stats: CauseStats) -> dict[str, object]:
    """Return what ``lmcache_store.explain.merge`` needs. As metrics, they would be tenants times causes."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cause_tokens": dict(stats.cause_tokens),
        "diverged_tokens": dict(stats.diverged_tokens),
    }
