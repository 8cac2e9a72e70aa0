"""Keys by how long ago each was accessed, and how many bytes were since."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

UNTRACKED = -1
"""Instead of a distance: the key is not known."""

_GROUP, _SUPER = 5, 10  # bits of a position: sums are kept over 32 and over 1,024 of them
_FEWEST = 1 << _SUPER


class RecencyStack:
    """Keys in the order of their last access, and the sum of bytes from any of them on; not thread-safe.

    Every access takes the next position; sums are kept over positions, groups and groups of groups, so that a
    distance takes three sums of short lists. When positions run out the keys move together.
    """

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._next = self._oldest = 0
        self.num_bytes = 0
        """Of all keys together."""
        self._allocate([], [])

    def __len__(self) -> int:
        return len(self._position)

    def __iter__(self) -> Iterator[int]:
        return iter(self._position)

    def access(self, keys: Sequence[int], num_bytes: int, weightless: Container[int] = ()) -> list[int]:
        """Return the bytes of each key and of all that were accessed after it, or UNTRACKED; then move all to
        the young end, one after the other. They take ``num_bytes`` each, or 0 if ``weightless``."""
        position, own, groups, supers = self._position, self._bytes, self._groups, self._supers
        found, total = [], 0
        for key in keys:
            at = position.get(key)
            if at is None:
                found.append(UNTRACKED)
                continue
            group, above = (at >> _GROUP) + 1, (at >> _SUPER) + 1
            found.append(
                sum(own[at : group << _GROUP])
                + sum(groups[group : above << _SUPER - _GROUP])
                + sum(supers[above:])
            )
        for key in keys:
            new = self._next
            if new == len(own):
                self._move_together()
                own, groups, supers, new = self._bytes, self._groups, self._supers, self._next
            self._next = new + 1
            self._keys[new] = key
            at = position.get(key)
            position[key] = new
            if at is not None and (removed := own[at]):  # as _take_out(), without the call
                own[at] = 0
                groups[at >> _GROUP] -= removed
                supers[at >> _SUPER] -= removed
                total -= removed
            if key not in weightless:
                own[new] = num_bytes
                groups[new >> _GROUP] += num_bytes
                supers[new >> _SUPER] += num_bytes
                total += num_bytes
        self.num_bytes += total
        return found

    def forget(self, key: int) -> None:
        """Stop tracking a key."""
        self._take_out(self._position.pop(key))

    def forget_beyond(self, num_bytes: float) -> int:
        """Stop tracking the oldest keys until the others are not more than ``num_bytes``; return how many."""
        before = len(self)
        while self.num_bytes > num_bytes:
            key = self._keys[self._oldest]
            if self._position.get(key) == self._oldest:
                self.forget(key)
            self._oldest += 1
        return before - len(self)

    def weigh(self, num_bytes: int, weightless: Container[int] = ()) -> None:
        """Let all keys take ``num_bytes`` from now on, or 0 if ``weightless``."""
        self._move_together()
        keys = self._keys[: self._next]
        sizes = [0 if key in weightless else num_bytes for key in keys]
        self._allocate(keys, sizes)
        self.num_bytes = sum(sizes)

    def _take_out(self, at: int) -> None:
        num_bytes = self._bytes[at]
        self._bytes[at] = 0
        self._groups[at >> _GROUP] -= num_bytes
        self._supers[at >> _SUPER] -= num_bytes
        self.num_bytes -= num_bytes

    def _move_together(self) -> None:
        """Close the gaps."""
        place = self._position.get
        used = [at for at, key in enumerate(self._keys[: self._next]) if place(key) == at]
        self._allocate([self._keys[at] for at in used], [self._bytes[at] for at in used])

    def _allocate(self, keys: list[int], num_bytes: list[int]) -> None:
        """Have room for twice as many keys."""
        free = -len(keys) % _FEWEST + len(keys) + _FEWEST
        self._keys, self._bytes = keys + [0] * free, num_bytes + [0] * free
        self._groups, self._supers = _sums(self._bytes, _GROUP), _sums(self._bytes, _SUPER)
        self._position.update(zip(keys, range(len(keys)), strict=False))
        self._next, self._oldest = len(keys), 0


def _sums(numbers: Sequence[int], bits: int) -> list[int]:
    return [sum(numbers[i : i + (1 << bits)]) for i in range(0, len(numbers), 1 << bits)]
