"""Copy batches: adjacent pieces are joined, and pieces are split at memory edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.cuda.copies import CopyBatch

MEMORY = 200


def words(values):
    return np.array(values, np.uint64)


def copied(to, from_, sizes):
    """Return a memory after the copies; the content of the source is its addresses."""
    source, target = np.arange(MEMORY), np.full(MEMORY, -1)
    for t, f, size in zip(to.tolist(), from_.tolist(), sizes.tolist(), strict=True):
        assert size > 0
        target[t : t + size] = source[f : f + size]
    return target.tolist()


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 4]), min_size=len(sizes), max_size=len(sizes)))
    to = np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps)
    from_ = draw(st.one_of(
        st.just((to + draw(st.integers(0, 5))).tolist()),
        st.lists(st.integers(0, MEMORY - 12), min_size=len(sizes), max_size=len(sizes)),
    ))  # fmt: skip
    edges = sorted(draw(st.sets(st.integers(0, MEMORY), max_size=10)))
    return words(to), words(from_), words(sizes), words(edges)


def crosses(starts, sizes, edges):
    return any(
        s < e < s + n for s, n in zip(starts.tolist(), sizes.tolist(), strict=True) for e in edges.tolist()
    )


def pieces_of(batch):
    return batch.to, batch.from_, batch.sizes


@given(batches())
def test_copies_the_same_bytes_and_no_piece_crosses_an_edge(drawn):
    *arrays, edges = drawn
    batch = CopyBatch(*arrays, edges=edges)
    assert copied(*pieces_of(batch)) == copied(*arrays)
    assert not crosses(batch.to, batch.sizes, edges)
    assert not crosses(batch.from_, batch.sizes, edges)
    for array in pieces_of(batch):
        assert array.dtype == np.uint64
        assert array.flags.c_contiguous


@given(batches())
def test_pieces_adjacent_on_both_sides_are_joined(drawn):
    *arrays, _ = drawn
    to, from_, sizes = pieces_of(CopyBatch(*arrays))
    assert copied(to, from_, sizes) == copied(*arrays)
    assert not ((to[1:] == to[:-1] + sizes[:-1]) & (from_[1:] == from_[:-1] + sizes[:-1])).any()


def test_refuses_arrays_of_unequal_length():
    with pytest.raises(ValueError, match="2 targets, 1 sources and 2 sizes"):
        CopyBatch(words([0, 1]), words([5]), words([1, 1]))
