"""Holds: which rows hints retain, until when, and within which budget. Pure: it knows keys, not memory.

A hold may name rows that are not in memory, or not stored yet. It retains them when they come. Rows that are
evicted and promoted again are retained again.

A key has one hold: that of the highest priority, and among equal priorities the one that ends last. If the
budget of an account is full, the keys of the lowest holds leave, the last chunk first.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmcache_store.tiers.base import RowKey

MAX_HOLDS = 4096
"""Limit of the holds of an account. The lowest one ends first."""

_MIN_COMPACTED = 64  # entries of a heap that is compacted
_MAX_OPEN = 1024  # requests whose later rows join a hold

T = TypeVar("T", bound=tuple[Any, ...])

Rank = tuple[float, float]
"""Priority and end of a hold. Rows of the lowest rank are evicted first."""

LOWEST: Rank = (-math.inf, -math.inf)


@dataclass(eq=False, slots=True)
class Hold:
    """The rows that one hint retains."""

    tenant: bytes
    """The tenant whose budget the rows count against."""
    request_id: str
    message_id: str
    action_id: str
    expires_at: float
    """End, by the clock of the memory tier."""
    priority: int = 0
    keys: dict[RowKey, int] = field(default_factory=dict)
    """Slots by key, in the order of the chunks."""
    tokens_per_row: float = 0.0
    """Tokens of a chunk, divided by the rows of a chunk."""
    num_saved: int = 0
    """Hits of rows that an LRU would have evicted."""
    num_evicted: int = 0
    """Rows that memory evicted nevertheless."""
    num_slots: int = 0
    account: Hashable = None
    """The budget that the rows count against; ``Holds`` sets it."""

    @property
    def saved_tokens(self) -> int:
        """Tokens of the rows that were hit although an LRU would have evicted them."""
        return round(self.num_saved * self.tokens_per_row)

    @property
    def rank(self) -> Rank:
        """Return the place of the hold among others."""
        return self.priority, self.expires_at


def compact(heap: list[T], is_present: Callable[[T], bool], num_present: int) -> None:
    """Remove the entries of a heap that are not present, if there may be more of them than of the others."""
    if len(heap) > 2 * num_present + _MIN_COMPACTED:
        heap[:] = filter(is_present, heap)
        heapq.heapify(heap)


class Holds:
    """All holds of a memory tier."""

    def __init__(self, clock: Callable[[], float], account_of: Callable[[bytes], Hashable]) -> None:
        """``account_of`` returns the name of a tenant's account."""
        self._clock = clock
        self._account_of = account_of
        self.on_end: Callable[[Hold], None] = lambda hold: None
        """Called with each hold that ended."""
        self._by_key: dict[RowKey, Hold] = {}
        self._queues: dict[Hashable, list[tuple[Rank, int, Hold]]] = {}  # by account, the lowest first
        self._ends: list[tuple[float, int, Hold]] = []
        self._num_slots = Counter[Hashable]()  # by account
        self._present: dict[Hold, None] = {}
        self._open: OrderedDict[Hashable, Hold] = OrderedDict()  # by request
        self._number = 0

    def __len__(self) -> int:
        return len(self._present)

    @property
    def present(self) -> list[Hold]:
        """All holds that have not ended, the oldest first."""
        self._expire()
        return list(self._present)

    def of(self, key: RowKey) -> Hold | None:
        """Return the hold of a key; None: nothing retains it now."""
        hold = self._by_key.get(key)
        return hold if hold is not None and hold.expires_at > self._clock() else None

    def regroup(self) -> None:
        """Sort the holds into accounts again: the accounts of tenants have changed."""
        self._queues.clear()
        self._num_slots.clear()
        for hold in self._present:
            self._enter(hold)
            self._num_slots[hold.account] += hold.num_slots

    def room(self, tenant: bytes, rank: Rank, max_slots: int) -> int:
        """Return how many slots a hold of this rank can have, when lower holds of the account leave.

        ``max_slots``: budget of the tenant's account.
        """
        self._expire()
        queue = self._queues.get(self._account_of(tenant), ())
        higher = [hold.num_slots for _, _, hold in queue if hold.rank > rank and hold in self._present]
        return max(0, max_slots - sum(higher)) if len(higher) < MAX_HOLDS else 0

    def add(self, hold: Hold, keys: Iterable[tuple[RowKey, int]], max_slots: int) -> None:
        """Add a hold of these keys with their slots, which fit into ``room``. Lower holds leave for it."""
        self._present[hold] = None
        self._enter(hold)
        heapq.heappush(self._ends, (hold.expires_at, self._number, hold))
        compact(self._ends, lambda entry: entry[2] in self._present, len(self._present))
        for key, num_slots in keys:
            self._take(hold, key, num_slots)
        self._shrink(hold.account, max_slots)

    def open(self, request: Hashable, hold: Hold) -> None:
        """Let rows that the request stores from now on join the hold."""
        self._open[request] = hold
        self._open.move_to_end(request)
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)

    def join(self, request: Hashable, key: RowKey, num_slots: int, max_slots: Callable[[bytes], int]) -> None:
        """Add a row that a request has stored to the request's open hold, if that has room."""
        hold = self._open.get(request)
        if hold is None or hold not in self._present:
            return
        if self._num_slots[hold.account] + num_slots <= max_slots(hold.tenant) and key not in hold.keys:
            self._take(hold, key, num_slots)

    def release(self, keys: Sequence[RowKey]) -> list[RowKey]:
        """End the hold of the last held key for all of these keys. Return the keys that nothing retains.

        Rows of other holds stay retained, such as those of a system prompt that many sessions share.
        """
        last = next((hold for key in reversed(keys) if (hold := self.of(key)) is not None), None)
        if last is not None:
            for key in keys:
                if self._by_key.get(key) is last:
                    self._drop(key)
            if not last.keys:
                self._end(last)
        return [key for key in keys if self.of(key) is None]

    def _enter(self, hold: Hold) -> None:
        hold.account = self._account_of(hold.tenant)
        self._number += 1
        heapq.heappush(self._queues.setdefault(hold.account, []), (hold.rank, self._number, hold))

    def _take(self, hold: Hold, key: RowKey, num_slots: int) -> None:
        former = self._by_key.get(key)
        if former is not None:
            if former is hold or (former.rank > hold.rank and former.expires_at > self._clock()):
                return
            self._drop(key)
            if not former.keys:
                self._end(former)
        self._by_key[key] = hold
        hold.keys[key] = num_slots
        hold.num_slots += num_slots
        self._num_slots[hold.account] += num_slots

    def _drop(self, key: RowKey) -> None:
        hold = self._by_key.pop(key)
        num_slots = hold.keys.pop(key)
        hold.num_slots -= num_slots
        self._num_slots[hold.account] -= num_slots

    def _end(self, hold: Hold) -> None:
        if hold in self._present:
            del self._present[hold]
            for key in list(hold.keys):
                self._drop(key)
            self.on_end(hold)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and (self._ends[0][0] <= now or self._ends[0][2] not in self._present):
            self._end(heapq.heappop(self._ends)[2])

    def _shrink(self, account: Hashable, max_slots: int) -> None:
        """Let the lowest holds of an account leave until it is within its budget."""
        queue = self._queues[account]
        num_present = 0 if len(queue) > MAX_HOLDS else len(self._present)
        compact(queue, lambda entry: entry[2] in self._present, num_present)
        while queue and (self._num_slots[account] > max_slots or len(queue) > MAX_HOLDS):
            hold = queue[0][2]
            if len(queue) <= MAX_HOLDS:
                while hold.keys and self._num_slots[account] > max_slots:
                    self._drop(next(reversed(hold.keys)))
                if hold.keys:
                    return
            heapq.heappop(queue)
            self._end(hold)
