"""Keys in the order of their last access, with the bytes accessed since then (stack distances)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

UNTRACKED = -1
"""Value in place of a distance if the key is not tracked."""

_GROUP, _SUPER = 5, 10  # bits of a position: there are sums over 32 and over 1,024 positions
_MIN_FREE = 1 << _SUPER


class RecencyStack:
    """Keys in the order of their last access, and the stack distance of each. Not thread-safe.

    Every access takes the next position. The stack holds sums over groups of positions and over groups of
    groups, so that a distance is three sums of short lists. When positions run out, the keys are moved
    together.
    """

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._next = self._oldest = 0
        self.num_bytes = 0
        """Bytes of all keys together."""
        self._allocate([], [])

    def __len__(self) -> int:
        return len(self._position)

    def __iter__(self) -> Iterator[int]:
        return iter(self._position)

    def access(self, keys: Sequence[int], num_bytes: int, weightless: Container[int] = ()) -> list[int]:
        """Return the stack distances of all keys in bytes, then mark the keys as accessed, one after another.

        A distance includes the key itself; it is UNTRACKED for unknown keys. Afterwards each key counts
        ``num_bytes``, or 0 if it is in ``weightless``.
        """
        positions, sizes, groups, supers = self._position, self._bytes, self._groups, self._supers
        distances, total = [], 0
        for key in keys:
            old = positions.get(key)
            if old is None:
                distances.append(UNTRACKED)
                continue
            group, above = (old >> _GROUP) + 1, (old >> _SUPER) + 1
            distances.append(
                sum(sizes[old : group << _GROUP])
                + sum(groups[group : above << _SUPER - _GROUP])
                + sum(supers[above:])
            )
        for key in keys:
            new = self._next
            if new == len(sizes):
                self._move_together()
                sizes, groups, supers, new = self._bytes, self._groups, self._supers, self._next
            self._next = new + 1
            self._keys[new] = key
            old = positions.get(key)
            positions[key] = new
            if old is not None and (removed := sizes[old]):  # like _take_out(), without the cost of a call
                sizes[old] = 0
                groups[old >> _GROUP] -= removed
                supers[old >> _SUPER] -= removed
                total -= removed
            if key not in weightless:
                sizes[new] = num_bytes
                groups[new >> _GROUP] += num_bytes
                supers[new >> _SUPER] += num_bytes
                total += num_bytes
        self.num_bytes += total
        return distances

    def forget(self, key: int) -> None:
        """Stop tracking a key."""
        self._take_out(self._position.pop(key))

    def forget_beyond(self, num_bytes: float) -> int:
        """Stop tracking the oldest keys until at most ``num_bytes`` remain; return how many they are."""
        before = len(self)
        while self.num_bytes > num_bytes:
            key = self._keys[self._oldest]
            if self._position.get(key) == self._oldest:
                self.forget(key)
            self._oldest += 1
        return before - len(self)

    def weigh(self, num_bytes: int, weightless: Container[int] = ()) -> None:
        """Count ``num_bytes`` for every key from now on, or 0 if it is in ``weightless``."""
        self._move_together()
        keys = self._keys[: self._next]
        sizes = [0 if key in weightless else num_bytes for key in keys]
        self._allocate(keys, sizes)
        self.num_bytes = sum(sizes)

    def _take_out(self, position: int) -> None:
        num_bytes = self._bytes[position]
        self._bytes[position] = 0
        self._groups[position >> _GROUP] -= num_bytes
        self._supers[position >> _SUPER] -= num_bytes
        self.num_bytes -= num_bytes

    def _move_together(self) -> None:
        """Remove the gaps between the positions of keys."""
        position_of = self._position.get
        used = [index for index, key in enumerate(self._keys[: self._next]) if position_of(key) == index]
        self._allocate([self._keys[index] for index in used], [self._bytes[index] for index in used])

    def _allocate(self, keys: list[int], num_bytes: list[int]) -> None:
        """Allocate positions for the keys and for as many more."""
        free = -len(keys) % _MIN_FREE + len(keys) + _MIN_FREE
        self._keys, self._bytes = keys + [0] * free, num_bytes + [0] * free
        self._groups, self._supers = _sums(self._bytes, _GROUP), _sums(self._bytes, _SUPER)
        self._position.update(zip(keys, range(len(keys)), strict=False))
        self._next, self._oldest = len(keys), 0


def _sums(numbers: Sequence[int], bits: int) -> list[int]:
    return [sum(numbers[i : i + (1 << bits)]) for i in range(0, len(numbers), 1 << bits)]
