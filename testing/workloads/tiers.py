"""Tiers of an LLM service, exact: LRU, looked up by leading runs, touched tail first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from testing.workloads.requests import row_hash


class Rows(OrderedDict[int, float]):
    """An LRU cache of rows, with the time when each was last touched."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def resize(self, capacity: int) -> None:
        """What is too much goes at once, the oldest first."""
        self.capacity = capacity
        while len(self) > capacity:
            self.popitem(last=False)

    def run(self, keys: Sequence[int], start: int = 0) -> int:
        """Up to which key all are there, from ``start`` on."""
        for i in range(start, len(keys)):
            if keys[i] not in self:
                return i
        return max(start, len(keys))

    def touch(self, keys: Sequence[int], time: float = 0.0) -> None:
        """Take keys in, or make them the youngest; tail first."""
        if not self.capacity:
            return
        for key in reversed(keys):
            self[key] = time
            self.move_to_end(key)
            if len(self) > self.capacity:
                self.popitem(last=False)


class Hits(NamedTuple):
    """Rows of one request, by where they were hit."""

    engine: int
    memory: int
    remote: int
    missed: int


class Shards:
    """A remote tier: equal shards, each row on the one that rendezvous hashing says.

    After a change, what the new owner does not have is asked of the old one for a while, and written anew.
    """

    TRANSITION = 900.0
    LONGEST_REFRESH = 600.0

    def __init__(self, count: int, rows_per_shard: int, *, refresh: float | None = None) -> None:
        """``refresh``: seconds after which what is hit nearer is made young again; None: a quarter of how
        long the tier keeps it."""
        self.rows_per_shard, self.fixed_refresh = rows_per_shard, refresh
        self.shards = [Rows(rows_per_shard) for _ in range(count)]
        self.previous: list[Rows] = []
        self.until = 0.0
        self.num_moved = 0
        """Rows written, and read."""
        self._owners: dict[int, int] = {}
        self._old_owners: dict[int, int] = {}

    def resize(self, count: int, time: float) -> None:
        self.previous, self.until = self.shards, time + self.TRANSITION
        self._old_owners, self._owners = self._owners, {}
        kept = self.shards[:count]
        self.shards = kept + [Rows(self.rows_per_shard) for _ in range(count - len(kept))]

    def run(self, keys: Sequence[int], start: int, time: float) -> int:
        for i in range(start, len(keys)):
            if keys[i] not in self._owner(keys[i]) and not (
                time < self.until and keys[i] in self._old_owner(keys[i])
            ):
                return i
        return max(start, len(keys))

    def touch(self, keys: Sequence[int], num_nearer: int, time: float) -> None:
        """Write what is not there; what is hit nearer is refreshed only now and then."""
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
        """How long ago the oldest rows were touched, where shards are full."""
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
    """By rendezvous hashing: with one shard more, a row stays or goes to the new one."""
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
        """Of every pod."""
        for memory in self.memories:
            memory.resize(memory_rows)

    def serve(self, pod: int, keys: Sequence[int], time: float = 0.0) -> Hits:
        """One request: looked up whole, then all of it is touched."""
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
