"""What lies in the disk tier's directory, and what goes next. Pure: ids and numbers.

Stores and loads don't say which request they are for, but a chain's rows come head first and close together:
the time in which an eighth of the capacity is stored or used is one **epoch**, and of the oldest epoch the
last object goes first. So tails go before heads, but for a chain that spans two epochs.

An object costs 200 bytes: its id, the dictionary's entry, its number, and 24 bytes of lists and of the
policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from lmcache.tiers.base import KEY_BYTES, ObjectId
from lmcache.tiers.policy import LRU

MAX_OBJECTS = 1 << 24
"""64 TiB in objects of 4 MiB; what the policy needs for so many is populated as it is used."""

_EPOCHS = 8  # per capacity


class Index:
    """Not thread-safe. An object has a slot: the number by which lists and policy know it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.num_bytes = 0  # of all objects
        self._capacity = capacity_bytes
        self._free_bytes = capacity_bytes  # less what is reserved, too
        # One dictionary of a million entries would hold the GIL for 30 ms when it grows.
        self._shards: list[dict[ObjectId, int]] = [{} for _ in range(256)]
        self._ids: list[ObjectId | None] = []  # by slot
        self._bytes = array("Q")  # by slot
        self._free: list[int] = []
        self._policy = LRU(MAX_OBJECTS)
        self._epoch = 0
        self._epoch_left = 0  # bytes

    def __contains__(self, object_id: ObjectId) -> bool:
        return object_id in self._shard(object_id)

    def reserve(self, num_bytes: int) -> int | None:
        """Take a slot and bytes for an object that will be written. None: something must go first."""
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
        """The object was not written."""
        self._free_bytes += self._bytes[slot]
        self._free.append(slot)

    def commit(self, slot: int, object_id: ObjectId) -> None:
        """The object was written, in place of one of this id if there was one."""
        self.discard(object_id)
        self._shard(object_id)[object_id] = slot
        self._ids[slot] = object_id
        self.num_bytes += self._bytes[slot]
        self.use(object_id)

    def use(self, object_id: ObjectId) -> None:
        """Note that an object was stored or loaded: it is deeper than those before."""
        slot = self._shard(object_id).get(object_id)
        if slot is not None:
            self._policy.admit(slot, self._enter(self._bytes[slot]))

    def touch(self, ids: Iterable[ObjectId]) -> list[ObjectId]:
        """Note that objects, head first, were used; return those that are here."""
        here = [object_id for object_id in ids if object_id in self]
        slots = [self._shard(object_id)[object_id] for object_id in here]
        self._policy.touch(slots, self._enter(sum(self._bytes[slot] for slot in slots)))
        return here

    def discard(self, object_id: ObjectId) -> None:
        """The object is gone; ignored when it is not known."""
        slot = self._shard(object_id).pop(object_id, None)
        if slot is not None:
            self.num_bytes -= self._bytes[slot]
            self._ids[slot] = None
            self._policy.remove(slot)
            self.abort(slot)

    def ids(self) -> Iterator[ObjectId]:
        """Yield all ids, the next victim first; ends with the first change."""
        return (object_id for slot in self._policy.victims() if (object_id := self._ids[slot]))

    def _shard(self, object_id: ObjectId) -> dict[ObjectId, int]:
        return self._shards[object_id[KEY_BYTES]]

    def _enter(self, num_bytes: int) -> int:
        """Return the epoch of a use of ``num_bytes``."""
        if self._epoch_left <= 0:
            self._epoch += 1
            self._epoch_left = self._capacity // _EPOCHS
        self._epoch_left -= num_bytes
        return self._epoch
