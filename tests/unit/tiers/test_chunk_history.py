"""The chunks of the past: compared with a model that forgets nothing, and bounded."""

import hashlib
import itertools
import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.tiers.tiered.history import ChunkHistory, Past, chunk_names

TREE = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map("".join)
"""A prompt: each prefix of the text is a chunk, as in a chain of hashes."""


def row_key(text: str) -> bytes:
    return b"n" * 32 + hashlib.sha256(text.encode()).digest()


def names_of(text: str):
    return chunk_names([row_key(text[: end + 1]) for end in range(len(text))])


class Model:
    """Sets and a dictionary without bounds."""

    def __init__(self) -> None:
        self.looked_up: set[str] = set()
        self.next: dict[str, str] = {}

    def observe(self, text: str) -> Past:
        prefixes = [text[: end + 1] for end in range(len(text))]
        num_known = next((i for i, prefix in enumerate(prefixes) if prefix not in self.looked_up), len(text))
        has_diverged = 0 < num_known < len(text) and self.next.get(text[:num_known]) not in (
            None,
            prefixes[num_known],
        )
        self.looked_up.update(prefixes)
        self.next.update(itertools.pairwise(prefixes))
        return Past(num_known, has_diverged)


@given(st.lists(TREE, max_size=30))
def test_past_is_that_of_a_model_without_bounds(prompts):
    history, model = ChunkHistory(1 << 10), Model()
    for prompt in prompts:
        assert history.observe(names_of(prompt)) == model.observe(prompt)


@given(st.lists(TREE, min_size=1), st.lists(TREE))
def test_stored_chunks_do_not_count_as_looked_up(stored, looked_up):
    history = ChunkHistory(1 << 10)
    for prompt in stored:
        history.note_stored(names_of(prompt))
    model = Model()
    for prompt in looked_up:
        assert history.observe(names_of(prompt)) == model.observe(prompt)
    for prompt in stored:
        assert history.is_stored(row_key(prompt))
    for prompt in looked_up:
        is_stored = any(other.startswith(prompt) for other in stored)
        assert history.is_stored(row_key(prompt)) == is_stored


def test_hits_in_a_tier_count_as_stored():
    history = ChunkHistory(1 << 10)
    assert history.observe(names_of("abcd"), 1, 3) == Past(3, False)
    assert [history.is_stored(row_key("abcd"[:end])) for end in range(1, 5)] == [False, True, True, False]


def test_chunks_in_a_lower_tier_count_as_looked_up():
    history = ChunkHistory(1 << 10)
    history.note_found(names_of("abc"))
    assert history.is_stored(row_key("abc"))
    assert history.observe(names_of("abcd")) == Past(3, False)


def test_forgets_the_least_recently_used_chunk_of_a_full_set():
    history = ChunkHistory(1)
    oldest, *newer = (np.array([number], np.uint64) for number in range(1, 5))
    for name in (oldest, *newer, oldest):
        history.observe(name)
    history.observe(np.array([99], np.uint64))
    assert history.observe(oldest).num_known == 1
    assert history.observe(newer[0]).num_known == 0


def test_remembers_a_quarter_of_a_million_chunks():
    """Sets of four chunks fill unevenly. At half of the capacity, few chunks are lost."""
    history = ChunkHistory()
    names = np.frombuffer(os.urandom(8 * 250_000), np.uint64)
    for part in np.split(names, 100):
        history.observe(part)
    num_known = sum(history.observe(names[i : i + 1]).num_known for i in range(0, len(names), 100))
    assert num_known > 0.95 * len(names) / 100


def test_chunks_of_one_request_do_not_take_the_place_of_each_other():
    history = ChunkHistory(1)
    names = np.arange(1, 5, dtype=np.uint64)
    history.observe(names)
    assert history.observe(names).num_known == 4
