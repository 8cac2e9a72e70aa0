"""Rules of KV groups, compared with attention token by token."""

from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.kv_groups import (
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
    """Return whether attention at ``query`` reads this earlier token."""
    return {
        FULL: True,
        WINDOW: token > query - group.window_tokens,
        CHUNKED: token // group.window_tokens == query // group.window_tokens
        if group.window_tokens
        else True,
        STATE: token == query - 1,
    }[group.kind]


def read_after(group: KVGroup, end: int) -> list[int]:
    """Return the tokens before ``end`` that attention reads at ``end``; for a state, its snapshot."""
    return [token for token in range(end) if is_read(group, token, end)]


@st.composite
def models_with_groups(draw):
    block_tokens = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    chunk_tokens = 12 * draw(st.integers(1, 2))
    groups = []
    for number, block in enumerate(block_tokens):
        kind = draw(st.sampled_from(list(GroupKind)))
        window = 0 if kind in (FULL, STATE) else draw(st.integers(1, 3 * chunk_tokens))
        group = KVGroup(number, block, 1, window, kind)
        groups.append(KVGroup(number, block, stored_blocks(group, chunk_tokens), window, kind))
    return tuple(groups), chunk_tokens


def covered(group: KVGroup, chunk_tokens: int, chunk: int) -> range:
    """Return the tokens whose KV the chunk's row holds."""
    end = (chunk + 1) * chunk_tokens
    return range(end - stored_blocks(group, chunk_tokens) * group.block_tokens, end)


def can_resume(groups, chunk_tokens, residency, local, end_chunk) -> bool:
    """Oracle: return whether all tokens that attention reads are in present rows or in the engine."""
    for group, present in zip(groups, residency, strict=True):
        available = {
            token
            for chunk in range(end_chunk)
            if present[chunk]
            for token in covered(group, chunk_tokens, chunk)
        }
        available.update(range(local * chunk_tokens))
        if not available.issuperset(read_after(group, end_chunk * chunk_tokens)):
            return False
    return True


@given(model=models_with_groups(), data=st.data())
def test_longest_hit_ends_at_the_last_edge_with_all_read_tokens(model, data):
    groups, chunk_tokens = model
    bits = st.lists(st.sampled_from([0, 1, 1, 1]), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS)
    residency = [bytes(data.draw(bits)) for _ in groups]
    at_least = data.draw(st.integers(0, NUM_CHUNKS))
    at_most = data.draw(st.integers(at_least, NUM_CHUNKS))
    hit = longest_hit(groups, chunk_tokens, residency, at_least, at_most)
    possible = [
        end
        for end in range(at_least, at_most + 1)
        if end == at_least or can_resume(groups, chunk_tokens, residency, at_least, end)
    ]
    # A row that holds more tokens than this edge needs counts only if the whole row is present.
    assert hit in possible
    for end in possible:
        if end > hit:
            assert any(
                0 in present[max(at_least, first_needed_chunk(group, end, chunk_tokens)) : end]
                for group, present in zip(groups, residency, strict=True)
            )


@given(model=models_with_groups(), end_chunk=st.integers(0, NUM_CHUNKS))
def test_hit_needs_all_tokens_read_after_its_end(model, end_chunk):
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


@given(models_with_groups())
def test_rows_hold_only_blocks_read_by_some_hit(model):
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
