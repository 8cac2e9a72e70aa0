"""The shared index: clients find the row of a key in shared memory, without a call to the sidecar.

The sidecar writes the shared index and never reads it, because its own index is a dict, from which it can
rebuild the shared index. The reader is an engine's scheduler (``MappedIndex`` in ``mapping``). A row is
listed from the moment it is visible (complete in all columns, and verified) until it leaves the sidecar's
index.

**Format.** A bucket has 8 entries of 64 bits: the upper half of the key's hash, and row + 1 (0 means empty).
The lower half of the hash selects the bucket. A key is in that bucket or in the next one. Keys are SHA-256
digests, so their own bits serve as the hash, mixed with the bits of their namespace. At most a quarter of
the entries is in use, so two full neighboring buckets are nearly impossible. If it happens, one of their
entries is replaced, and is a miss for readers.

**A reader trusts nothing here.** An entry is a hint. The slot table says which key a row holds, under which
generation. A table entry is valid if its state and generation are the same before and after its key is read.
A torn, stale or overwritten entry is a miss.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmcache_store.tiers.base import KEY_BYTES, RowKey

BUCKET_ENTRIES = 8
BUCKET_BYTES = 8 * BUCKET_ENTRIES

U64 = np.dtype("<u8")

_QUAD = struct.Struct("<Q")


def num_buckets(num_rows: int) -> int:
    """Return how many buckets ``num_rows`` rows need: a power of two, at most the number of rows."""
    return 1 << ((num_rows - 1) // 2).bit_length()


def hashes(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash row keys, ``[n, 8]`` words."""
    mixed: NDArray[np.uint64] = keys[:, 0] ^ keys[:, KEY_BYTES // 8]
    return mixed


def hash_of(key: RowKey) -> int:
    """Hash one row key."""
    (namespace_bits,), (chunk_bits,) = _QUAD.unpack_from(key), _QUAD.unpack_from(key, KEY_BYTES)
    return int(namespace_bits ^ chunk_bits)


class SharedIndex:
    """The writer's view of the index, over ``[num_buckets * BUCKET_BYTES]`` bytes."""

    def __init__(self, buckets: NDArray[np.uint8]) -> None:
        self._buckets = buckets
        self._words: Any = buckets.data.cast("Q")
        self._mask = len(buckets) // BUCKET_BYTES - 1

    def clear(self) -> None:
        """Remove all rows."""
        self._buckets[:] = 0

    def insert(self, key: RowKey, row: int) -> None:
        """Add a row."""
        places, entry = self._places(key, row)
        present = [self._words[place] for place in places]
        if entry in present:
            return
        # Both buckets are full, almost certainly because an engine overwrote them: replace any entry.
        free = present.index(0) if 0 in present else row % len(places)
        self._words[places[free]] = entry  # one store of 8 bytes: readers see the old or the new entry

    def remove(self, key: RowKey, row: int) -> None:
        """Remove a row. A row that is not listed is ignored."""
        places, entry = self._places(key, row)
        for place in places:
            if self._words[place] == entry:
                self._words[place] = 0

    def _places(self, key: RowKey, row: int) -> tuple[list[int], int]:
        mixed = hash_of(key)
        home, after = mixed & self._mask, (mixed + 1) & self._mask
        places = [bucket * BUCKET_ENTRIES + i for bucket in (home, after) for i in range(BUCKET_ENTRIES)]
        return places, mixed >> 32 << 32 | row + 1
