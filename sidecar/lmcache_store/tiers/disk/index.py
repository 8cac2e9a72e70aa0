"""Index of the disk tier: its objects and their eviction order. Pure: ids and numbers.

Stores and loads do not name their request, but the rows of a chain arrive head first and close together. An
**epoch** is the time in which an eighth of the capacity is stored or used. The last object of the oldest
epoch is evicted first. Tails are therefore evicted before heads, except for a chain that spans two epochs.

An object takes 200 bytes: its id, the dictionary's entry, its number, and 24 bytes of lists and policy.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from lmcache_store.tiers.base import KEY_BYTES, StoredId
from lmcache_store.tiers.policy import LRU

MAX_OBJECTS = 1 << 24
"""64 TiB in objects of 4 MiB. The policy's memory for them is taken as it is used."""

_EPOCHS = 8  # number of epochs in which the whole capacity is used


class DiskIndex:
    """Not thread-safe. Lists and policy identify an object by its slot number."""

    def __init__(self, capacity_bytes: int) -> None:
        self.num_bytes = 0  # total of all objects
        self._capacity = capacity_bytes
        self._free_bytes = capacity_bytes  # capacity minus objects and reservations
        # A single dictionary of a million entries would hold the GIL for 30 ms when it grows.
        self._shards: list[dict[StoredId, int]] = [{} for _ in range(256)]
        self._ids: list[StoredId | None] = []  # by slot
        self._bytes = array("Q")  # by slot
        self._free: list[int] = []
        self._policy = LRU(MAX_OBJECTS)
        self._owners: dict[StoredId, str] = {}  # of objects whose owner has a bound
        self.bytes_by_owner: Counter[str] = Counter()
        """Bytes of the objects of each owner that has a bound."""
        self._epoch = 0
        self._epoch_left = 0  # bytes

    def __contains__(self, stored_id: StoredId) -> bool:
        return stored_id in self._shard(stored_id)

    def reserve(self, num_bytes: int) -> int | None:
        """Reserve a slot and ``num_bytes`` for a new object. None: evict an object first."""
        if num_bytes > self._free_bytes or (not self._free and len(self._ids) == MAX_OBJECTS):
            return None
        self._free_bytes -= num_bytes
        if not self._free:
            self._free.append(len(self._ids))
            self._ids.append(None)
            self._bytes.append(0)
        slot = self._free.pop()
        self._bytes[slot] = num_bytes
        return slot

    def abort(self, slot: int) -> None:
        """Cancel a reservation: the object was not written."""
        self._free_bytes += self._bytes[slot]
        self._free.append(slot)

    def commit(self, slot: int, stored_id: StoredId) -> None:
        """Index an object that was written. Replaces an earlier object of this id."""
        self.discard(stored_id)
        self._shard(stored_id)[stored_id] = slot
        self._ids[slot] = stored_id
        self.num_bytes += self._bytes[slot]
        self.use(stored_id)

    def use(self, stored_id: StoredId) -> None:
        """Note that an object was stored or loaded. It counts as deeper than the objects before it."""
        slot = self._shard(stored_id).get(stored_id)
        if slot is not None:
            self._policy.admit(slot, self._enter(self._bytes[slot]))

    def assign(self, stored_id: StoredId, owner: str) -> None:
        """Count an object for an owner from now on. Unknown ids are ignored."""
        slot = self._shard(stored_id).get(stored_id)
        if slot is not None:
            self._release(stored_id, slot)
            self._owners[stored_id] = owner
            self.bytes_by_owner[owner] += self._bytes[slot]

    def _release(self, stored_id: StoredId, slot: int) -> None:
        owner = self._owners.pop(stored_id, None)
        if owner is not None:
            self.bytes_by_owner[owner] -= self._bytes[slot]
            if not self.bytes_by_owner[owner]:
                del self.bytes_by_owner[owner]

    def touch(self, ids: Iterable[StoredId]) -> list[StoredId]:
        """Note that objects, head first, were used. Returns the indexed ones."""
        indexed = [stored_id for stored_id in ids if stored_id in self]
        slots = [self._shard(stored_id)[stored_id] for stored_id in indexed]
        self._policy.touch(slots, self._enter(sum(self._bytes[slot] for slot in slots)))
        return indexed

    def discard(self, stored_id: StoredId) -> None:
        """Remove an object. Unknown ids are ignored."""
        slot = self._shard(stored_id).pop(stored_id, None)
        if slot is not None:
            self._release(stored_id, slot)
            self.num_bytes -= self._bytes[slot]
            self._ids[slot] = None
            self._policy.remove(slot)
            self.abort(slot)

    def ids(self) -> Iterator[StoredId]:
        """Yield all ids in eviction order. The iterator is valid until the next change."""
        return (stored_id for slot in self._policy.victims() if (stored_id := self._ids[slot]))

    def _shard(self, stored_id: StoredId) -> dict[StoredId, int]:
        return self._shards[stored_id[KEY_BYTES]]

    def _enter(self, num_bytes: int) -> int:
        """Count a use of ``num_bytes``, and return its epoch."""
        if self._epoch_left <= 0:
            self._epoch += 1
            self._epoch_left = self._capacity // _EPOCHS
        self._epoch_left -= num_bytes
        return self._epoch
