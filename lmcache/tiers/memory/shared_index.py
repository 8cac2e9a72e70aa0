"""The index beside the slot table, in shared memory: which row holds a key, read without a call.

The sidecar writes it and never reads it: its own index is a dict, and this one is rebuilt from that. An
engine's scheduler reads it (``MappedIndex`` in ``mapping``). A row is in it from when it is visible (complete
in all columns, verified) until it leaves the index.

Buckets of 8 entries, an entry is 64 bits: the upper half of the key's hash, and row + 1 (0: empty). The lower
half of the hash names the bucket; a key stands there or in the next one. Keys are SHA-256 digests, so their
own bits are the hash, mixed with those of their namespace. At most a quarter of the entries is in use, so two
full neighbours are next to impossible: one of what is in them makes room, and is a miss for the readers.

**A reader trusts nothing here.** An entry is a hint: the slot table says whose the row is, and under which
generation, and an entry of it is whole when state and generation are the same before and after its key is
read. What is torn, stale or scribbled over is a miss.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.base import KEY_BYTES, RowKey

BUCKET_ENTRIES = 8
BUCKET_BYTES = 8 * BUCKET_ENTRIES

U64 = np.dtype("<u8")

_QUAD = struct.Struct("<Q")


def num_buckets(num_rows: int) -> int:
    """Return how many buckets ``num_rows`` rows need: a power of two, not more than there are rows."""
    return 1 << ((num_rows - 1) // 2).bit_length()


def hashes(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash row keys, ``[n, 8]`` words."""
    mixed: NDArray[np.uint64] = keys[:, 0] ^ keys[:, KEY_BYTES // 8]
    return mixed


class SharedIndex:
    """The writer's end, over ``[num_buckets * BUCKET_BYTES]`` bytes."""

    def __init__(self, buckets: NDArray[np.uint8]) -> None:
        self._buckets = buckets
        self._words: Any = buckets.data.cast("Q")
        self._mask = len(buckets) // BUCKET_BYTES - 1

    def clear(self) -> None:
        """Forget all rows."""
        self._buckets[:] = 0

    def insert(self, key: RowKey, row: int) -> None:
        """Show a row."""
        places, entry = self._places(key, row)
        present = [self._words[place] for place in places]
        if entry in present:
            return
        # Without room, as good as surely an engine wrote over them: any place will do.
        free = present.index(0) if 0 in present else row % len(places)
        self._words[places[free]] = entry  # one store of 8 bytes: readers see all of it or nothing

    def remove(self, key: RowKey, row: int) -> None:
        """Hide a row; one that is not shown is ignored."""
        places, entry = self._places(key, row)
        for place in places:
            if self._words[place] == entry:
                self._words[place] = 0

    def _places(self, key: RowKey, row: int) -> tuple[list[int], int]:
        (of_namespace,), (of_chunk,) = _QUAD.unpack_from(key), _QUAD.unpack_from(key, KEY_BYTES)
        mixed = of_namespace ^ of_chunk
        home, after = mixed & self._mask, (mixed + 1) & self._mask
        places = [bucket * BUCKET_ENTRIES + at for bucket in (home, after) for at in range(BUCKET_ENTRIES)]
        return places, mixed >> 32 << 32 | row + 1
