"""Remembers which chunks requests looked up, and which were stored. Pure: no clock, no I/O.

A chunk is remembered by 64 bits of its key. The table is bounded: each new chunk replaces the least recently
used one of its set. A chunk that was forgotten counts as never looked up.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_store.tiers.base import ROW_KEY_BYTES, RowKey

Names = npt.NDArray[np.uint64]
"""Names of a request's chunks, head first."""

_WAYS = 4
_LOOKED_UP, _STORED = 1, 2
_MIX = 0x9E3779B97F4A7C15  # spreads names that differ in few bits over the sets
_WORDS = ROW_KEY_BYTES // 8
_WORD, _SET = struct.Struct("<Q"), struct.Struct(f"={_WAYS}Q")
_LAST_WORD = ROW_KEY_BYTES - 8


class Past(NamedTuple):
    """Chunks of a request that the history held before the request."""

    num_known: int
    """Leading chunks that an earlier request looked up."""
    has_diverged: bool
    """True if an earlier request went on with another chunk after the last known one."""


def chunk_names(keys: list[RowKey]) -> Names:
    """Return the names of row keys. Chunks of different namespaces have different names."""
    words = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), _WORDS)
    names: Names = words[:, -1] ^ words[:, 0]
    return names


class ChunkHistory:
    """The chunks of the past, in sets of four. The default size holds half a million chunks in 13 MB."""

    def __init__(self, num_sets: int = 1 << 17) -> None:
        """``num_sets`` must be a power of two."""
        self._mask, self._last_set = np.uint64(num_sets - 1), num_sets - 1
        self._names = np.zeros((num_sets, _WAYS), np.uint64)  # 0: free
        self._name_bytes = self._names.data.cast("B")  # reading one set costs less than with numpy
        self._ages = np.zeros(num_sets * _WAYS, np.uint64)  # number of the last use; 0: free
        self._next = np.zeros(num_sets * _WAYS, np.uint32)  # the chunk that followed last; 0: none did
        self._flags = np.zeros(num_sets * _WAYS, np.uint8)
        self._seconds = np.zeros(num_sets * _WAYS, np.uint32)  # time of the first look-up
        self._num_uses = 0  # calls that used chunks

    def observe(
        self, names: Names, num_engine: int = 0, num_hit: int = 0, now: float = 0.0, num_blocks: int = 0
    ) -> Past:
        """Record a request's chunks.

        The leading ``num_hit`` were hits, so they are known. Those from ``num_engine`` on are in a tier.
        ``now``: see ``first_seconds``. ``num_blocks``: leading names that are blocks of the first chunk. They
        are known if it is, even if only a lower tier knows the chunk.
        """
        if not len(names):
            return Past(0, False)
        places, is_known = self._find(names)
        is_looked_up = is_known & ((self._flags[places] & _LOOKED_UP) != 0)
        has_past = is_looked_up.copy()
        has_past[: max(num_hit, num_blocks * int(is_looked_up[num_blocks]))] = True
        num_known = len(names) if has_past.all() else int(has_past.argmin())
        following = _following(names)
        has_diverged = False
        if 0 < num_known < len(names) and is_known[num_known - 1]:
            has_diverged = bool(self._next[places[num_known - 1]] not in (0, following[num_known - 1]))
        places = self._admit(names, places, is_known)
        self._seconds[places[~is_looked_up]] = int(now)
        self._flags[places] |= _LOOKED_UP
        self._flags[places[num_engine:num_hit]] |= _STORED
        self._next[places[:-1]] = following
        return Past(num_known, has_diverged)

    def note_stored(self, names: Names) -> None:
        """Record that these chunks are, or were, in a tier."""
        places, is_known = self._find(names)
        self._flags[self._admit(names, places, is_known)] |= _STORED

    def note_found(self, names: Names) -> None:
        """Record that a lower tier holds these chunks. Requests of this or another sidecar looked them up."""
        places, is_known = self._find(names)
        self._flags[self._admit(names, places, is_known)] |= _LOOKED_UP | _STORED

    def first_seconds(self, names: Names) -> int:
        """Return when the first of these chunks was first looked up, in seconds."""
        places, is_known = self._find(names[:1])
        return int(self._seconds[places[0]]) if is_known[0] else 0

    def is_stored(self, key: RowKey) -> bool:
        """Return True if this chunk was in a tier at some time."""
        name = _WORD.unpack_from(key, _LAST_WORD)[0] ^ _WORD.unpack_from(key)[0]
        number = ((name ^ name >> 32) * _MIX >> 32) & self._last_set
        ways = _SET.unpack_from(self._name_bytes, number * _SET.size)
        return name in ways and bool(self._flags[number * _WAYS + ways.index(name)] & _STORED)

    def _find(self, names: Names) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the place of each chunk, and whether it is known. An unknown one has a place of its set."""
        mixed = (names ^ names >> np.uint64(32)) * np.uint64(_MIX) >> np.uint64(32)
        sets = (mixed & self._mask).astype(np.intp)
        matches = self._names[sets] == names[:, None]
        return sets * _WAYS + matches.argmax(1), matches.any(1)

    def _admit(
        self, names: Names, places: npt.NDArray[np.intp], is_known: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.intp]:
        """Give unknown chunks the places of the least recently used ones, and mark all as just used."""
        self._num_uses += 1
        unknown = (~is_known).nonzero()[0]
        places, ages = places.copy(), self._ages.reshape(-1, _WAYS)
        self._ages[places[is_known]] = self._num_uses
        while len(unknown):  # in each round, a set admits one chunk
            sets = places[unknown] // _WAYS
            first = np.sort(np.unique(sets, return_index=True)[1]) if has_duplicates(sets) else slice(None)
            admitted, sets = unknown[first], sets[first]
            chosen = places[admitted] = sets * _WAYS + ages[sets].argmin(1)
            self._names.reshape(-1)[chosen] = names[admitted]
            self._next[chosen], self._flags[chosen], self._ages[chosen] = 0, 0, self._num_uses
            self._seconds[chosen] = 0
            unknown = np.delete(unknown, first)
        return places


def _following(names: Names) -> npt.NDArray[np.uint32]:
    """Return what ``_next`` holds for each chunk but the last one, if the chain was looked up last."""
    return (names[1:] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def has_duplicates(numbers: npt.NDArray[np.intp]) -> bool:
    """Return True if a number occurs more than once."""
    return len(set(numbers.tolist())) < len(numbers)
