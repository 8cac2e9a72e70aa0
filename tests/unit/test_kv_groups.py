"""The rules of KV groups against attention itself, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.kv_groups import (
    GroupKind,
    KVGroup,
    first_needed_chunk,
    first_needed_token,
    longest_hit,
    stored_blocks,
)

FULL, WINDOW, CHUNKED, STATE = GroupKind
NUM_CHUNKS = 6


def is_read(group: KVGroup, token: int, query: int) -> bool:
    """Does attention at ``query`` read this earlier token?"""
    return {
        FULL: True,
        WINDOW: token > query - group.window_tokens,
        CHUNKED: token // group.window_tokens == query // group.window_tokens
        if group.window_tokens
        else True,
        STATE: token == query - 1,
    }[group.kind]


def read_after(group: KVGroup, end: int) -> list[int]:
    """Tokens before ``end`` that are read there (later on there are no more); of a state, its snapshot."""
    return [token for token in range(end) if is_read(group, token, end)]


@st.composite
def groups_of_a_model(draw):
    block_tokens = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    chunk_tokens = 12 * draw(st.integers(1, 2))
    made = []
    for number, block in enumerate(block_tokens):
        kind = draw(st.sampled_from(list(GroupKind)))
        window = 0 if kind in (FULL, STATE) else draw(st.integers(1, 3 * chunk_tokens))
        group = KVGroup(number, block, 1, window, kind)
        made.append(KVGroup(number, block, stored_blocks(group, chunk_tokens), window, kind))
    return tuple(made), chunk_tokens


def covered(group: KVGroup, chunk_tokens: int, chunk: int) -> range:
    """Tokens whose KV the chunk's row holds."""
    end = (chunk + 1) * chunk_tokens
    return range(end - stored_blocks(group, chunk_tokens) * group.block_tokens, end)


def can_resume(groups, chunk_tokens, residency, local, end_chunk) -> bool:
    """The oracle: is every token that is read in rows that are there, or in the engine already?"""
    for group, present in zip(groups, residency, strict=True):
        there = {
            token
            for chunk in range(end_chunk)
            if present[chunk]
            for token in covered(group, chunk_tokens, chunk)
        }
        there.update(range(local * chunk_tokens))
        if not there.issuperset(read_after(group, end_chunk * chunk_tokens)):
            return False
    return True


@given(model=groups_of_a_model(), data=st.data())
def test_the_longest_hit_is_the_last_edge_at_which_nothing_that_is_read_is_missing(model, data):
    groups, chunk_tokens = model
    bits = st.lists(st.sampled_from([0, 1, 1, 1]), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS)
    residency = [bytes(data.draw(bits)) for _ in groups]
    at_least = data.draw(st.integers(0, NUM_CHUNKS))
    at_most = data.draw(st.integers(at_least, NUM_CHUNKS))
    found = longest_hit(groups, chunk_tokens, residency, at_least, at_most)
    possible = [
        end
        for end in range(at_least, at_most + 1)
        if end == at_least or can_resume(groups, chunk_tokens, residency, at_least, end)
    ]
    # A row that holds more than this edge needs must be whole, though a part of it would do.
    assert found in possible
    for end in possible:
        if end > found:
            assert any(
                0 in present[max(at_least, first_needed_chunk(group, end, chunk_tokens)) : end]
                for group, present in zip(groups, residency, strict=True)
            )


@given(model=groups_of_a_model(), end_chunk=st.integers(0, NUM_CHUNKS))
def test_what_a_hit_needs_is_what_is_read_from_its_end_on(model, end_chunk):
    groups, chunk_tokens = model
    end = end_chunk * chunk_tokens
    for group in groups:
        tokens = read_after(group, end)
        assert list(range(first_needed_token(group, end), end)) == tokens
        chunks = sorted({token // chunk_tokens for token in tokens})
        if group.chunk_bytes:
            assert list(range(first_needed_chunk(group, end_chunk, chunk_tokens), end_chunk)) == chunks
        for chunk in chunks:
            needed = [token for token in tokens if token // chunk_tokens == chunk]
            assert set(needed) <= set(covered(group, chunk_tokens, chunk))


@given(groups_of_a_model())
def test_a_row_holds_no_block_that_no_hit_reads(model):
    groups, chunk_tokens = model
    for group in groups:
        edges = range(chunk_tokens, chunk_tokens * (2 * (group.window_tokens or 1) + 2), chunk_tokens)
        first_block = chunk_tokens // group.block_tokens - stored_blocks(group, chunk_tokens)
        read = {
            (token % chunk_tokens) // group.block_tokens
            for edge in edges
            for token in read_after(group, edge)
        }
        assert min(read, default=chunk_tokens // group.block_tokens) == first_block


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (KVGroup(0, 32, 1), 8),
        (KVGroup(0, 32, 1, 128, WINDOW), 4),
        (KVGroup(0, 32, 1, 129, WINDOW), 4),
        (KVGroup(0, 32, 1, 130, WINDOW), 5),
        (KVGroup(0, 32, 1, 1024, WINDOW), 8),
        (KVGroup(0, 32, 0, 256, CHUNKED), 0),
        (KVGroup(0, 32, 0, 8192, CHUNKED), 8),
        (KVGroup(0, 128, 1, 0, STATE), 1),
    ],
)
def test_blocks_of_a_chunk_of_256_tokens(group, blocks):
    assert stored_blocks(group, 256) == blocks


def test_a_group_that_stores_nothing_limits_no_hit():
    groups = KVGroup(0, 16, 4096), KVGroup(1, 16, 0, 256, CHUNKED)
    assert longest_hit(groups, 256, [b"\1\1\1", b""], 0, 3) == 3
    assert first_needed_chunk(groups[1], 3, 256) == 3


def test_a_shorter_end_needs_other_rows_of_a_window():
    full, window = KVGroup(0, 16, 4096), KVGroup(1, 16, 4096, 128, WINDOW)
    assert longest_hit((full, window), 256, [b"\1\1\1\1", b"\0\1\1\0"], 0, 4) == 3
    assert longest_hit((full, window), 256, [b"\1\1\0\1", b"\1\0\1\1"], 0, 4) == 1
    assert longest_hit((full, window), 256, [b"\1\1\1\1", b"\0\0\0\0"], 2, 4) == 2
