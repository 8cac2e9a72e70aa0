"""Conditions at the end of a soak run, and the resources that a sidecar may hold without clients."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.soak.memory import Trend
from testing.soak.pages import of_sums
from testing.soak.rows import TENANTS

MIN_HIT_SHARE = 0.2
"""Smallest share of looked-up rows that a run must load. Without hits, a run proves nothing about loads."""
TIERS = "memory", "disk", "remote"
SECONDS_FOR_ALL_TIERS = 600
"""Length of the runs that must have hits in all tiers. A shorter run may not fill the upper tiers."""
FAULTS_FOR_OVERLAP = 60
"""Number of faults of a kind of which one must happen while both secrets rotate."""
GROWTH_MEBIBYTES, GROWTH_MEBIBYTES_PER_HOUR = 3.0, 1.0
"""Largest growth of the sidecar's private memory in the last half of a run, along a line through the samples.

The ring of samples does not count, see ``testing.soak.memory``. The first number is for the other records,
which are full after some thousand requests. A leak of 200 bytes per request exceeds the limit in an hour.
"""
MAX_MORE_DESCRIPTORS, MAX_MORE_THREADS = 12, 24
"""Descriptors and threads that the sidecar may have more than after its start: connections to Redis, and
threads that start when the sidecar first needs them. Measured: up to 4 descriptors and 12 threads. A kind of
fault that leaks a descriptor exceeds the limit in a run of ten minutes, which has 27 faults of each kind."""


@dataclass(frozen=True)
class Held:
    """Resources of a sidecar process."""

    descriptors: Counter[str]
    """Open descriptors by the start of what they refer to, with names of files."""
    num_threads: int

    @property
    def num_descriptors(self) -> int:
        return self.descriptors.total()

    def __str__(self) -> str:
        return f"{self.num_descriptors} descriptors, {self.num_threads} threads"

    @classmethod
    def of(cls, pid: int) -> Held:
        """Read the resources of a process."""
        descriptors: Counter[str] = Counter()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:  # closed meanwhile
                continue
            descriptors[target.partition("[")[0] if ":" in target else target] += 1
        return cls(descriptors, len(list(Path(f"/proc/{pid}/task").iterdir())))


def of_counts(
    counts: Mapping[str, int], hit_tokens: Mapping[str, int], tiers: Sequence[str] = TIERS
) -> Iterator[str]:
    """Yield the violations in the clients' counts, and tiers of ``tiers`` without hits."""
    if number := counts.get("wrong", 0):
        yield f"{number} clients loaded wrong bytes: their logs say which"
    looked_up, loaded = counts.get("looked_up", 0), counts.get("loaded", 0)
    if loaded < MIN_HIT_SHARE * looked_up or not looked_up:
        yield f"{loaded} of {looked_up} looked-up rows were loaded, less than {MIN_HIT_SHARE:.0%}"
    for tier in tiers:
        if not hit_tokens.get(tier):
            yield f"no load hit in the {tier} tier, so the run proves nothing about it"


def of_overlap(faults: Mapping[str, int], at_once: Mapping[str, int]) -> Iterator[str]:
    """Yield the kinds of faults that never happened while keys and password rotated together."""
    for name, number in faults.items():
        if number >= FAULTS_FOR_OVERLAP and not at_once.get(name) and not name.startswith("rotate_"):
            yield f"{number} times {name}, but never while keys and password rotated together"
    if not faults.get("rotate_both"):
        yield "keys and password never rotated together"


def of_tenants(stats: Mapping[str, Any], digest: str) -> Iterator[str]:
    """Yield what is wrong with the budgets of tenants. ``digest``: that of the newest tenants file."""
    tenants = stats["tenants"]
    if problem := tenants["tenants_problem"]:
        yield f"the sidecar does not use all budgets of tenants: {problem}"
    if tenants["tenants_digest"] != digest:
        yield "the sidecar does not use the newest tenants file"
    yield from of_sums(stats)


def of_tenant_hits(hit_tokens: Mapping[str, int], tenants: Sequence[str] = TENANTS) -> Iterator[str]:
    """Yield the tenants that have no hits."""
    yield from (f"the tenant {name} has no hits" for name in tenants if not hit_tokens.get(name))


def of_idle_stats(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a sidecar without clients still holds for one, or has still to do."""
    expected = {
        "clients": sum(stats["num_clients"].values()),
        "clients of earlier sidecars": stats["num_previous_clients"],
        "leased rows": stats["memory"]["leased_rows"],
        "slots in quarantine": stats["memory"]["quarantined_slots"],
        "slots under way": stats["transfer"]["num_slots_under_way"],
        "unwritten rows": stats["num_unwritten_rows"],
        "queued loads": sum(stats[tier]["num_queued_loads"] for tier in ("disk", "remote")),
    }
    yield from (f"the sidecar still has {number} {name}" for name, number in expected.items() if number)


def of_keys(stats: Mapping[str, Any], version: int) -> Iterator[str]:
    """Yield the tiers that do not encrypt with the key ``version``, the newest one."""
    for tier in ("disk", "remote"):
        used, problem = stats[tier]["encryption"]["write_version"], stats[tier]["encryption_problem"]
        if used != version or problem:
            yield f"the {tier} tier encrypts with key {used} instead of {version}: {problem or 'no problem'}"


def of_resources(idle: Held, end: Held) -> Iterator[str]:
    """Yield leaks of a sidecar that had ``idle`` resources after its start, and has ``end`` ones now."""
    more = end.num_descriptors - idle.num_descriptors
    if more > MAX_MORE_DESCRIPTORS:
        yield f"the sidecar has {more} descriptors more than at its start: {dict(end.descriptors)}"
    wrong = [name for name in end.descriptors if name.endswith((".lock", " (deleted)"))]
    if wrong:
        yield f"the sidecar has deleted files or lock files of clients open: {', '.join(wrong[:5])}"
    if (more := end.num_threads - idle.num_threads) > MAX_MORE_THREADS:
        yield f"the sidecar has {more} threads more than at its start"


def of_files(folder: Path, disk: Path, used_bytes: int, log: str) -> Iterator[str]:
    """Yield files that were left behind, in the socket's folder and in the disk tier of ``used_bytes``.

    A client that is killed between its lock and its attachment leaves an empty file. The sidecar does not
    know it, and removes the file at its next start. ``log``: the sidecar's log, which names attached clients.
    """
    expected = {"arena", "kvcache.sock", "clients", "log"}
    yield from (f"unexpected file {path}" for path in folder.iterdir() if path.name not in expected)
    for path in (folder / "clients").iterdir():
        if f"Client {path.stem} attached" in log:
            yield f"lock file of a dead client: {path}"
    files = [path for path in disk.rglob("*") if path.is_file()]
    yield from (f"unfinished file {path}" for path in files if path.suffix == ".tmp")
    stored = sum(path.stat().st_blocks * 512 for path in files)
    if stored > used_bytes:
        yield f"the files of the disk tier take {stored} bytes, but the sidecar counts {used_bytes}"


def max_growth(seconds: float) -> float:
    """Return the largest growth of memory in so many seconds, in MiB."""
    return GROWTH_MEBIBYTES + GROWTH_MEBIBYTES_PER_HOUR * seconds / 3600


def of_memory(trend: Trend) -> Iterator[str]:
    """Yield a violation if memory is not flat."""
    if trend.growth_mebibytes > (limit := max_growth(trend.seconds)):
        yield (
            f"the sidecar's memory grew by {trend.growth_mebibytes:.1f} MiB in the last"
            f" {trend.seconds:.0f} s, the limit is {limit:.1f} MiB"
        )


def of_log(log: str) -> Iterator[str]:
    """Yield the lines of a sidecar's log that name a bug."""
    lines = log.splitlines()
    marks = "this is a bug", "Traceback (most recent call last)"
    bugs = [number for number, line in enumerate(lines) if any(mark in line for mark in marks)]
    if bugs:
        first = bugs[0]
        yield f"the sidecar's log names {len(bugs)} bugs, the first: " + "\n".join(lines[first : first + 25])
