"""What a batch makes of its pieces: joined where they continue one another, cut where memory has edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.cuda.copies import CopyBatch

MEMORY = 200


def words(values):
    return np.array(values, np.uint64)


def copied(to, from_, sizes):
    """A memory whose content is its addresses, after the copies."""
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


@given(batches())
def test_the_bytes_are_the_same_and_no_piece_lies_across_an_edge(batch):
    to, from_, sizes, edges = batch
    made = CopyBatch(to, from_, sizes, edges)
    assert copied(made.to, made.from_, made.sizes) == copied(to, from_, sizes)
    assert not crosses(made.to, made.sizes, edges)
    assert not crosses(made.from_, made.sizes, edges)
    for array in (made.to, made.from_, made.sizes):
        assert array.dtype == np.uint64
        assert array.flags.c_contiguous


@given(batches())
def test_what_continues_on_both_sides_is_one_piece(batch):
    to, from_, sizes, _ = batch
    made = CopyBatch(to, from_, sizes)
    assert copied(made.to, made.from_, made.sizes) == copied(to, from_, sizes)
    continues = (made.to[1:] == made.to[:-1] + made.sizes[:-1]) & (
        made.from_[1:] == made.from_[:-1] + made.sizes[:-1]
    )
    assert not continues.any()


def test_adjacent_pages_of_a_block_outermost_layout_are_one_piece():
    pages = np.arange(512, dtype=np.uint64) * np.uint64(4096)
    assert CopyBatch(pages, pages + np.uint64(1 << 40), np.full(512, 4096, np.uint64)).sizes.tolist() == [
        512 * 4096
    ]


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="2 targets, 1 sources and 2 sizes"):
        CopyBatch(words([0, 1]), words([5]), words([1, 1]))
