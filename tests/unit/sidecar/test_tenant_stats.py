"""Statistics of tenants by name: shares in bytes, bounds on disk, and causes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from lmcache_operator.stats import MAX_STATS_BYTES
from lmcache_sidecar.explain.causes import CauseStats
from lmcache_sidecar.files.tenants import TenantsFile
from lmcache_sidecar.pages.stats import document
from lmcache_sidecar.pages.tenant_stats import tenants_part
from lmcache_store import keys
from lmcache_store.causes import CAUSES
from lmcache_store.tenant_names import MAX_CHARACTERS, MAX_NAMED
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import MemoryStats

SLOT_BYTES, NUM_COLUMNS, NUM_SLOTS = 4096, 2, 7
UNNAMED = keys.tenant("unnamed", bytes(32)).hex()


def opened_memory() -> MemoryTier:
    memory = MemoryTier(PrivateArena(Geometry(SLOT_BYTES, NUM_COLUMNS), NUM_SLOTS))
    list(memory.adopt())
    return memory


def file_of(path: Path, text: str) -> TenantsFile:
    path.write_text(text)
    file = TenantsFile(str(path))
    file.follow()
    assert file.problem == ""
    return file


def named(name: str, limits: str = "") -> str:
    return f"{{name: {name}, saltHash: {keys.salt_hash(name).hex()}, {limits}}}"


def stats(file: TenantsFile, **sources: Any) -> dict[str, Any]:
    """The part of /stats about tenants."""
    part: dict[str, Any] = document([tenants_part(file, MemoryStats(), **sources)])["tenants"]
    return part


def test_shares_are_bytes_of_whole_slots(tmp_path: Path) -> None:
    file = file_of(tmp_path / "tenants", f"named: [{named('search', 'minMemoryPercent: 50')}]")
    part = stats(file, memory=opened_memory())
    row_bytes = SLOT_BYTES * NUM_COLUMNS
    assert part["guaranteed_bytes"] == {"default": 0, "search": 3 * row_bytes}
    assert part["bound_bytes"] == {"default": 7 * row_bytes, "search": 7 * row_bytes}


def test_shares_are_left_out_until_the_memory_has_a_format(tmp_path: Path) -> None:
    part = stats(file_of(tmp_path / "tenants", "{}"))
    assert "guaranteed_bytes" not in part
    assert "disk_bytes" not in part
    assert part["rows"] == {"default": 0}


def test_owners_on_disk_have_the_name_of_their_budget(tmp_path: Path) -> None:
    text = f"""
default: {{lowerTierBytes: 1Ki}}
named: [{named("search", "lowerTierBytes: 2Ki")}, {named("batch")}]
"""
    disk = DiskTier(tmp_path / "disk", 1 << 20)
    try:
        assert disk.indexed.wait(30)
        assert disk._index is not None
        owner = keys.salt_hash("search").hex()
        disk._index.bytes_by_owner.update({owner: 5, UNNAMED: 7, "removed": 9})
        part = stats(file_of(tmp_path / "tenants", text), disk=disk)
    finally:
        disk.close()
    assert part["disk_bytes"] == {"default": 16, "search": 5}
    assert part["disk_bound_bytes"] == {"default": 1024, "search": 2048}
    assert part["disk_refused"] == {"default": 0, "search": 0}


def test_causes_are_those_of_tenants_in_the_file(tmp_path: Path) -> None:
    counted = CauseStats()
    counted.count({"memory": 256, "new": 3})
    counted.note_divergence(60, 3)
    file = file_of(tmp_path / "tenants", f"named: [{named('search')}, {named('idle')}]")
    part = stats(file, causes={"search": counted, "removed": counted})
    assert part["causes"] == {
        "search": {
            "prompt_tokens": 259,
            "cause_tokens": Counter(memory=256, new=3),
            "diverged_tokens": {"64": 3},
        }
    }
    assert part["prompt_tokens"] == {"default": 0, "search": 259, "idle": 0}
    assert part["hit_tokens"] == {"default": 0, "search": 256, "idle": 0}


def test_operator_can_read_the_statistics_of_the_largest_file(tmp_path: Path) -> None:
    """The operator reads a limited number of bytes. Half of them are for all other parts of /stats."""
    names = [f"{number}".rjust(MAX_CHARACTERS, "x") for number in range(MAX_NAMED)]
    file = file_of(
        tmp_path / "tenants", f"named: [{', '.join(named(name, 'lowerTierBytes: 1023Ti') for name in names)}]"
    )
    counted = CauseStats()
    for depth in (1 << power for power in range(17)):
        counted.note_divergence(depth, 10**15)
    counted.count(dict.fromkeys(CAUSES, 10**15))
    counts = MemoryStats()
    for name in ("evicted", "refused", "disk_refused"):
        getattr(counts.tenant_counts, name).update(dict.fromkeys(names, 10**15))
    disk = DiskTier(tmp_path / "disk", 1 << 20)
    try:
        part = tenants_part(file, counts, dict.fromkeys(names, counted), opened_memory(), disk)
        content = document([part])
    finally:
        disk.close()
    assert len(content["tenants"]["disk_refused"]) == MAX_NAMED
    assert len(content["tenants"]["causes"]) == MAX_NAMED
    assert len(json.dumps(content)) < MAX_STATS_BYTES // 2
