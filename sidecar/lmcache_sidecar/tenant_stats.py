"""Statistics of tenants, by the names of their budgets. They contain no salts and no hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lmcache.tiers.stats import MemoryStats
from lmcache_sidecar.stats import Figure, Part, read
from lmcache_sidecar.tenants import TenantsFile


def _in_memory(counts: MemoryStats, number: str) -> Counter[str]:
    """Return a number of all rows in memory, by the name of their budget."""
    sums = Counter[str]()
    for account in counts.tenants.accounts:
        sums[account.budget.name] += getattr(account, number)
    return sums


def _by_name(tenants: tuple[TenantsFile, MemoryStats], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of the tenants that the file names now."""
    return {name: numbers.get(name, 0) for name in tenants[0].names}


# fmt: off
TENANTS: tuple[Figure[tuple[TenantsFile, MemoryStats]], ...] = (
    Figure("rows", "Rows in memory, by the name of the tenant; default: all tenants that are not named",
        lambda tenants: _by_name(tenants, _in_memory(tenants[1], "num_rows")), "tenant"),
    Figure("bytes", "Bytes of rows", lambda tenants: _by_name(tenants, _in_memory(tenants[1], "num_bytes")),
        "tenant"),
    Figure("evictions", "Rows that left memory for capacity or an upper bound, by the tenant of the row",
        lambda tenants: _by_name(tenants, tenants[1].tenant_counts.evicted), "tenant", is_counter=True),
    Figure("prompt_tokens", "Tokens of prompts that engines scheduled, by tenant",
        lambda tenants: _by_name(tenants, tenants[1].tenant_counts.prompt_tokens), "tenant", is_counter=True),
    Figure("hit_tokens", "The same tokens, without those that engines computed",
        lambda tenants: _by_name(tenants, tenants[1].tenant_counts.hit_tokens), "tenant", is_counter=True),
)
# fmt: on


def tenants_part(file: TenantsFile, counts: MemoryStats) -> Part:
    """Return the statistics of tenants by the names of their budgets. Never contains salts or their hashes.

    ``tenants_problem`` and ``tenants_digest`` are None without a file: budgets that no file declares have no
    problem. The operator compares the digest with that of the file that it wrote."""
    has_file = bool(file.path)
    facts = {
        "tenants_problem": file.problem if has_file else None,
        "tenants_digest": file.digest if has_file else None,
    }
    return Part("tenants", facts, read(TENANTS, (file, counts)), "lmcache_tenant")
