"""Exact tiers of an LLM service: LRU caches that look up leading runs and touch the tail first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from testing.workloads.requests import row_hash


class Rows(OrderedDict[int, float]):
    """An LRU cache of rows, with the time of each row's last touch."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def resize(self, capacity: int) -> None:
        """Change the capacity. Superfluous rows are evicted at once, oldest first."""
        self.capacity = capacity
        while len(self) > capacity:
            self.popitem(last=False)

    def run(self, keys: Sequence[int], start: int = 0) -> int:
        """The end of the run of present keys that begins at ``start``."""
        for i in range(start, len(keys)):
            if keys[i] not in self:
                return i
        return max(start, len(keys))

    def touch(self, keys: Sequence[int], time: float = 0.0) -> None:
        """Insert keys, or make them the youngest. The tail comes first."""
        if not self.capacity:
            return
        for key in reversed(keys):
            self[key] = time
            self.move_to_end(key)
            if len(self) > self.capacity:
                self.popitem(last=False)


class Hits(NamedTuple):
    """Rows of one request, by where they hit."""

    engine: int
    memory: int
    remote: int
    missed: int


class Shards:
    """A remote tier of equal shards. Rendezvous hashing selects the shard of each row.

    After a change, rows that the new owner lacks are read from the old owner for a while, and written to the
    new one.
    """

    TRANSITION = 900.0
    LONGEST_REFRESH = 600.0

    def __init__(self, count: int, rows_per_shard: int, *, refresh: float | None = None) -> None:
        """``refresh`` is the number of seconds after which rows that hit in nearer tiers are made young
        again. None: a quarter of the tier's residence time."""
        self.rows_per_shard, self.fixed_refresh = rows_per_shard, refresh
        self.shards = [Rows(rows_per_shard) for _ in range(count)]
        self.previous: list[Rows] = []
        self.until = 0.0
        self.num_moved = 0
        """Rows written and read."""
        self._owners: dict[int, int] = {}
        self._old_owners: dict[int, int] = {}

    def resize(self, count: int, time: float) -> None:
        self.previous, self.until = self.shards, time + self.TRANSITION
        self._old_owners, self._owners = self._owners, {}
        remaining = self.shards[:count]
        self.shards = remaining + [Rows(self.rows_per_shard) for _ in range(count - len(remaining))]

    def run(self, keys: Sequence[int], start: int, time: float) -> int:
        for i in range(start, len(keys)):
            if keys[i] not in self._owner(keys[i]) and not (
                time < self.until and keys[i] in self._old_owner(keys[i])
            ):
                return i
        return max(start, len(keys))

    def touch(self, keys: Sequence[int], num_nearer: int, time: float) -> None:
        """Write missing rows. Rows that hit in nearer tiers are refreshed only from time to time."""
        refresh = self.fixed_refresh
        if refresh is None:
            refresh = min(self.LONGEST_REFRESH, self._residence(time) / 4)
        for i in range(len(keys) - 1, -1, -1):
            shard = self._owner(keys[i])
            written = shard.get(keys[i])
            self.num_moved += written is None or i >= num_nearer
            if written is None or i >= num_nearer or time - written >= refresh:
                shard.touch(keys[i : i + 1], time)

    def _residence(self, time: float) -> float:
        """Time since the oldest rows of full shards were touched."""
        ages = [time - next(iter(shard.values())) for shard in self.shards if len(shard) >= shard.capacity]
        return min(ages, default=4 * self.LONGEST_REFRESH)

    def _owner(self, key: int) -> Rows:
        number = self._owners.get(key)
        if number is None:
            number = self._owners[key] = owner(key, len(self.shards))
        return self.shards[number]

    def _old_owner(self, key: int) -> Rows:
        number = self._old_owners.get(key)
        return self.previous[owner(key, len(self.previous)) if number is None else number]


def owner(key: int, count: int) -> int:
    """The owner by rendezvous hashing: if a shard is added, a row stays or moves to the new shard."""
    return max(range(count), key=lambda number: row_hash(key, number)) if count > 1 else 0


class Service:
    """Pods, each with an engine's own cache and a memory tier, and a remote tier that they share."""

    def __init__(
        self, num_pods: int, engine_rows: int, memory_rows: int, remote: Shards | None = None
    ) -> None:
        self.engines = [Rows(engine_rows) for _ in range(num_pods)]
        self.memories = [Rows(memory_rows) for _ in range(num_pods)]
        self.remote = remote

    def resize(self, memory_rows: int) -> None:
        """Resize the memory of every pod."""
        for memory in self.memories:
            memory.resize(memory_rows)

    def serve(self, pod: int, keys: Sequence[int], time: float = 0.0) -> Hits:
        """Serve one request: look up all of its rows, then touch all of them."""
        engine, memory, remote = self.engines[pod], self.memories[pod], self.remote
        hit = in_engine = engine.run(keys)
        in_memory = in_remote = 0
        while hit < len(keys):
            near = memory.run(keys, hit)
            far = near if remote is None else remote.run(keys, near, time)
            if far == hit:
                break
            in_memory += near - hit
            in_remote += far - near
            hit = far
        if remote is not None:
            remote.touch(keys, memory.run(keys), time)
        engine.touch(keys, time)
        memory.touch(keys, time)
        return Hits(in_engine, in_memory, in_remote, len(keys) - hit)
