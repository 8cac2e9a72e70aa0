"""What lies in the disk tier's directory, and what goes next. Pure: names and numbers.

Stores and loads don't say which request they are for, but a chain's rows come head first and close together:
the time in which an eighth of the capacity is stored or used is one **epoch**, and of the oldest epoch the
last object goes first. So tails go before heads, but for a chain that spans two epochs.

An object costs 200 bytes: its name, the dictionary's entry, its number, and 24 bytes of lists and of the
policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from lmcache.tiers.base import KEY_BYTES, RowKey
from lmcache.tiers.policy import LRU

Name = bytes
"""68 bytes, row key + column: what an object is called in memory."""

MAX_OBJECTS = 1 << 24
"""64 TiB in objects of 4 MiB; what the policy needs for so many is populated as it is used."""

_EPOCHS = 8  # per capacity


def name_of(key: RowKey, column: int) -> Name:
    """Name an object."""
    return key + column.to_bytes(4, "big")


class Index:
    """Not thread-safe. An object has a slot: the number by which lists and policy know it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.num_bytes = 0  # of all objects
        self._capacity = capacity_bytes
        self._room = capacity_bytes  # less what is reserved, too
        # One dictionary of a million entries would hold the GIL for 30 ms when it grows.
        self._shards: list[dict[Name, int]] = [{} for _ in range(256)]
        self._names: list[Name] = []  # by slot
        self._bytes = array("Q")  # by slot
        self._free: list[int] = []
        self._policy = LRU(MAX_OBJECTS)
        self._epoch = 0
        self._epoch_left = 0  # bytes

    def __contains__(self, name: Name) -> bool:
        return name in self._shard(name)

    def reserve(self, num_bytes: int) -> int | None:
        """Take a slot and room for an object that will be written. None: something must go first."""
        if num_bytes > self._room or (not self._free and len(self._names) == MAX_OBJECTS):
            return None
        self._room -= num_bytes
        if not self._free:
            self._free.append(len(self._names))
            self._names.append(b"")
            self._bytes.append(0)
        slot = self._free.pop()
        self._bytes[slot] = num_bytes
        return slot

    def abort(self, slot: int) -> None:
        """The object was not written."""
        self._room += self._bytes[slot]
        self._free.append(slot)

    def commit(self, slot: int, name: Name) -> None:
        """The object was written, in place of one of this name if there was one."""
        self.discard(name)
        self._shard(name)[name] = slot
        self._names[slot] = name
        self.num_bytes += self._bytes[slot]
        self.use(name)

    def use(self, name: Name) -> None:
        """Note that an object was stored or loaded: it is deeper than those before."""
        slot = self._shard(name).get(name)
        if slot is not None:
            self._policy.admit(slot, self._enter(self._bytes[slot]))

    def touch(self, names: Iterable[Name]) -> list[Name]:
        """Note that objects, head first, were used; return those that are here."""
        here = [name for name in names if name in self]
        slots = [self._shard(name)[name] for name in here]
        self._policy.touch(slots, self._enter(sum(self._bytes[slot] for slot in slots)))
        return here

    def discard(self, name: Name) -> None:
        """The object is gone; ignored when it is not known."""
        slot = self._shard(name).pop(name, None)
        if slot is not None:
            self.num_bytes -= self._bytes[slot]
            self._names[slot] = b""
            self._policy.remove(slot)
            self.abort(slot)

    def names(self) -> Iterator[Name]:
        """Yield all names, the next victim first; ends with the first change."""
        return (self._names[slot] for slot in self._policy.victims())

    def _shard(self, name: Name) -> dict[Name, int]:
        return self._shards[name[KEY_BYTES]]

    def _enter(self, num_bytes: int) -> int:
        """Return the epoch of a use of so many bytes."""
        if self._epoch_left <= 0:
            self._epoch += 1
            self._epoch_left = self._capacity // _EPOCHS
        self._epoch_left -= num_bytes
        return self._epoch
