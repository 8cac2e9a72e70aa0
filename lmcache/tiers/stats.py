"""What the tiers count: plain numbers that only rise, since the start of the process.

Each is declared once, by ``counter`` or ``counters``: its field's name, and what it means in words of users.
Whoever shows them (``/stats``, ``/metrics``, the guide's table) walks the fields; whoever counts writes
``stats.hits += 1``.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmcache.recent import Recent

_MAX_COUNTED = 4096  # chains that are remembered
_MAX_REASONS = 32


def counter(about: str) -> Any:
    """Declare a number that only rises."""
    return field(default=0, metadata={"about": about})


def counters(label: str, about: str) -> Any:
    """Declare one such number for each value of ``label``."""
    return field(default_factory=Counter, metadata={"about": about, "label": label})


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count by a reason that somebody else named: from a certain number on, new ones are ``other``."""
    is_few = reason in counts or len(counts) < _MAX_REASONS
    counts[reason if is_few else "other"] += 1


@dataclass(slots=True)
class TenantUse:
    """What a tenant has in memory."""

    name: bytes
    num_rows: int = 0
    num_bytes: int = 0
    """Of slots."""


class Tenants:
    """Rows and bytes in use by tenant; who has no name is one of them."""

    def __init__(self) -> None:
        self._uses = {b"": TenantUse(b"")}

    def enter(self, name: bytes, num_bytes: int) -> TenantUse:
        """Count a row; return what counts it, to be given to ``leave``."""
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = TenantUse(name)
        use.num_rows += 1
        use.num_bytes += num_bytes
        return use

    def leave(self, use: TenantUse, num_bytes: int) -> None:
        """A row is gone."""
        use.num_rows -= 1
        use.num_bytes -= num_bytes
        if use.name and not use.num_rows:
            del self._uses[use.name]

    def num_bytes(self, name: bytes) -> int:
        """What the tenant has."""
        use = self._uses.get(name)
        return use.num_bytes if use else 0

    def largest(self, limit: int = 32) -> tuple[list[TenantUse], TenantUse]:
        """Return what the largest tenants use, the largest first, and what all others use together."""
        uses = sorted(self._uses.values(), key=lambda use: use.num_bytes, reverse=True)
        others = TenantUse(b"other")
        for use in uses[limit:]:
            others.num_rows += use.num_rows
            others.num_bytes += use.num_bytes
        return [replace(use) for use in uses[:limit] if use.num_rows], others


class Removal(enum.Enum):
    """Why an object left a tier; a label of the removal counters."""

    EVICTED = "evicted"  # capacity: the policy chose it
    QUOTA = "quota"  # its tenant needed the room, and had his share
    INVALID = "invalid"  # checksum, length, version or key did not fit


@dataclass
class MemoryStats:
    """Of rows. A key counts once per request, by the first answer about it."""

    hits: int = counter(
        "Rows, or chunks of several KV groups, that lookups found in memory, the engine's own included"
    )
    misses: int = counter("Rows that lookups did not find there, whatever was brought afterwards")
    refused: int = counter("Reservations refused because no row could be freed")
    removed: Counter[Removal] = counters(
        "reason", "Rows that left memory: evicted, evicted for their tenant's quota, or not valid any more"
    )
    verified: int = counter("Rows from before a restart that were found intact")
    tenants: Tenants = field(default_factory=Tenants)
    """Who have rows now."""
    _counted: Recent[Hashable, int] = field(default_factory=lambda: Recent(_MAX_COUNTED))
    """Keys that were asked for, by chain."""

    def count_lookup(self, request: Hashable, keys: Sequence[bytes], num_resident: int) -> None:
        """Engines ask again and again while rows are coming: only keys they did not ask for before count."""
        chain = (request, *keys[:1])
        num_counted = self._counted.get(chain, 0)
        self.hits += max(0, num_resident - num_counted)
        self.misses += max(0, len(keys) - max(num_resident, num_counted))
        self._counted[chain] = max(len(keys), num_counted)


class WriteSkipped(enum.Enum):
    """Why a row is not (yet) in a lower tier; a label of the write counters."""

    REFUSED = "refused"  # by the tier: it is full, say; it is asked again later
    DROPPED = "dropped"  # the queue was full, or the arena got another format
    EVICTED = "evicted"  # left the memory tier before its turn
    FAILED = "failed"  # an error that the log tells of
    INVALIDATED = "invalidated"  # somebody wrote over it in memory, where it is gone now


@dataclass
class TieredStats:
    """What went between memory and one lower tier, in rows."""

    written: int = counter("Rows written through to the tier, or found there")
    writes_skipped: Counter[WriteSkipped] = counters("reason", "Rows that were not written (yet): why")
    promoted: int = counter("Rows brought from the tier into memory")
    promotions_failed: int = counter(
        "Rows that were not brought: gone, not valid, no room, or the tier became unavailable"
    )
    skipped_slower_than_recompute: int = counter(
        "Rows left in the tier, since computing them was estimated to be faster"
    )


@dataclass
class ObjectStats:
    """Of objects (one column of one row) in one lower tier."""

    hits: int = counter("Objects (one column of a row) that were loaded and valid")
    misses: int = counter("Objects that were asked for and not there")
    stored: int = counter("Objects written")
    touched: int = counter("Objects that were there already, and count as recently used again")
    refused: Counter[str] = counters("reason", "Objects that the tier did not take, by the error")
    invalid: Counter[str] = counters("reason", "Objects that were not valid, by what did not fit")
    failures: int = counter("Operations that found the tier unavailable")
    evicted: int = counter("Objects removed to make room; of servers, values, whoever had stored them")
