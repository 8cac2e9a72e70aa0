"""Pieces of a column's payload: the format that all readers and writers of a Redis share."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_store.tiers.encryption.pieces import OVERHEAD_BYTES
from lmcache_store.tiers.remote.objects import MAX_PIECE_BYTES, piece_sizes
from lmcache_store.tiers.remote.value_formats import SEAL_BYTES

KIB, MIB = 1 << 10, 1 << 20
STRING_BYTES = 10
"""Bytes around a value of more than 64 KiB in Redis: a header of 9 bytes and a zero (sds.h)."""


def block_of(num_bytes: int) -> int:
    """Return the size of jemalloc's block for a value, in bytes: four sizes per power of two."""
    step = max(16, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // step) * step


@given(st.integers(0, 80 * MIB))
def test_pieces_add_up_to_the_payload_and_are_small(total):
    sizes = piece_sizes(total)
    assert sum(sizes) == total
    assert all(0 < size <= MAX_PIECE_BYTES for size in sizes) or (total, sizes) == (0, [0])
    assert len(sizes) <= total // MAX_PIECE_BYTES + 5


@pytest.mark.parametrize("overhead_bytes", [SEAL_BYTES, OVERHEAD_BYTES], ids=["plain", "encrypted"])
@given(total=st.integers(16 * KIB, 80 * MIB))
def test_pieces_fill_their_allocator_blocks(overhead_bytes, total):
    assert total / sum(block_of(size + overhead_bytes + STRING_BYTES) for size in piece_sizes(total)) > 0.955


@pytest.mark.parametrize(
    ("total", "sizes"),
    [
        (100, [100]),
        (24 * KIB, [24 * KIB - 64, 64]),
        (64 * KIB, [64 * KIB - 64, 64]),
        (1153433, [MAX_PIECE_BYTES, 104921]),
        (4 * MIB, [MAX_PIECE_BYTES] * 4 + [256]),
        (36 * MIB, [MAX_PIECE_BYTES] * 36 + [2304]),
    ],
)
def test_piece_sizes_of_common_rows_do_not_change(total, sizes):
    """Other sizes are another format: rows of other releases in the same Redis would be invalid."""
    assert piece_sizes(total) == sizes
