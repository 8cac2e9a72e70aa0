"""Requests of an engine that names none: which lookup a load belongs to, and when a request ends."""

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lmcache_client.core.hits import words_of
from lmcache_client.core.paged.page_requests import _MAX_CHAINS, Lineage, PageRequest, PageRequests
from lmcache_store import keys
from lmcache_store.kv_groups import GroupKind, KVGroup

NAMESPACE = b"n" * 32
ONE_GROUP = (KVGroup(0, 64, 100),)
TWO_GROUPS = (KVGroup(0, 64, 100), KVGroup(1, 64, 100, 128, GroupKind.SLIDING_WINDOW))


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def request(*numbers: int, hits: int | None = None, began_at: float = 0.0, groups=ONE_GROUP) -> PageRequest:
    made = PageRequest("r", NAMESPACE, tuple(map(hash_of, numbers)), groups, began_at)
    made.num_hits = len(numbers) if hits is None else hits
    return made


def test_request_has_the_keys_of_each_group_as_bytes_and_as_words():
    made = request(1, 2, groups=TWO_GROUPS)
    expected = {
        group: b"".join(NAMESPACE + key for key in keys.chunk_keys(map(hash_of, (1, 2)), group=group))
        for group in (0, 1)
    }
    assert dict(made.keys) == expected
    assert {group: words.tobytes() for group, words in made.words.items()} == expected
    assert {(words.shape, words.dtype) for words in made.words.values()} == {((2, 8), np.dtype("<u8"))}
    assert words_of(b"").shape == (0, 8)


class TestNeeds:
    def test_pages_before_the_last_load_are_not_needed(self):
        made = request(1, 2, 3, 4, hits=3)
        assert [made.needs(0, hash_of(number)) for number in (1, 2, 3, 4, 9)] == [True] * 3 + [False] * 2
        made.note_loaded(0, 2)
        assert [made.needs(0, hash_of(number)) for number in (1, 2, 3, 4)] == [False, False, True, False]
        made.note_loaded(0, 1)
        assert not made.needs(0, hash_of(2)), "an earlier end changes nothing"

    def test_each_group_needs_its_own_load(self):
        made = request(1, 2, groups=TWO_GROUPS)
        made.note_loaded(0, 2)
        assert not made.needs(0, hash_of(1))
        assert made.needs(1, hash_of(1))
        assert not made.is_over
        made.note_loaded(1, 2)
        assert made.is_over

    def test_request_is_over_when_its_last_page_is_loaded_or_a_load_failed(self):
        made = request(1, 2, 3, hits=2)
        made.note_loaded(0, 1)
        assert not made.is_over
        made.note_loaded(0, 2)
        assert made.is_over
        failed = request(1, 2)
        failed.has_failed = True
        assert failed.is_over


class TestOpenRequests:
    def test_oldest_request_that_needs_the_page_is_found(self):
        opened, first, second = PageRequests(10.0), request(1, 2), request(1, 2, 3)
        opened.add(first)
        opened.add(second)
        assert opened.find(0, hash_of(1)) is first
        assert opened.find(0, hash_of(3)) is second
        assert opened.find(0, hash_of(4)) is None
        first.note_loaded(0, 1)
        assert opened.find(0, hash_of(1)) is second
        assert opened.find(0, hash_of(2)) is first
        opened.end(first)
        assert first not in opened
        assert opened.find(0, hash_of(2)) is second

    def test_request_that_found_all_pages_of_the_load_is_preferred(self):
        opened, short, long, longer = PageRequests(10.0), request(1, 2), request(1, 2, 3), request(1, 2, 3, 4)
        for made in (short, long, longer):
            opened.add(made)
        assert opened.find(0, hash_of(1), hash_of(2)) is short
        assert opened.find(0, hash_of(1), hash_of(3)) is long
        assert opened.find(0, hash_of(1), hash_of(4)) is longer
        assert opened.find(0, hash_of(1), hash_of(9)) is short, "no lookup has the last page"
        short.num_hits = longer.num_hits = 1
        assert opened.find(0, hash_of(1), hash_of(4)) is short, "no lookup found the last page"
        short.num_hits, longer.num_hits = 2, 4
        assert opened.find(0, hash_of(9), hash_of(1)) is None
        long.note_loaded(0, 3)
        assert opened.find(0, hash_of(1), hash_of(3)) is longer, "loaded before"

    def test_equal_requests_are_different(self):
        opened, first, second = PageRequests(10.0), request(1), request(1)
        opened.add(first)
        opened.add(second)
        opened.end(first)
        opened.end(first)
        assert opened.end_all() == [second]
        assert not len(opened)

    @pytest.mark.parametrize(("now", "expired"), [(109.9, []), (110.0, [0]), (114.9, [0]), (115.0, [0, 1])])
    def test_requests_expire_after_the_limit(self, now, expired):
        opened, requests = PageRequests(10.0), [request(1, began_at=100.0), request(2, began_at=105.0)]
        for made in requests:
            opened.add(made)
        assert opened.end_expired(now) == [requests[number] for number in expired]
        assert (len(opened), opened.end_expired(now)) == (2 - len(expired), [])


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=6)), max_size=5)
)
def test_loads_in_any_parts_end_each_lookup_once(lookups):
    """Each lookup of the first pages of one prompt, loaded in parts in the order of the lookups."""
    opened, ended = PageRequests(10.0), []
    for length, _ in lookups:
        opened.add(request(*range(length)))
    for length, parts in lookups:
        position = 0
        for part in [*parts, length]:
            end = min(length, position + part)
            if end == position:
                continue
            lookup = opened.find(0, hash_of(position))
            assert lookup is not None
            lookup.note_loaded(0, end)
            if lookup.is_over:
                opened.end(lookup)
                ended.append(lookup)
            position = end
    assert not len(opened)
    assert len(set(ended)) == len(ended) == len(lookups)


class TestLineage:
    def test_store_continues_the_chain_whose_end_it_follows(self):
        lineage = Lineage()
        a, b, c, d, e = map(hash_of, range(5))
        first = lineage.of([], [a, b])
        assert (lineage.of([a, b], [c]), lineage.of([a, b, c], [d, e])) == (first, first)
        other = lineage.of([], [b])
        assert other != first
        assert lineage.of([b], [c]) == other, "the last store of a page names its chain"

    def test_unknown_prefix_begins_a_chain(self):
        lineage = Lineage()
        assert len({lineage.of([hash_of(number)], [hash_of(number + 100)]) for number in range(10)}) == 10

    def test_two_prompts_with_a_common_start_share_its_chain(self):
        lineage = Lineage()
        start, left, right = map(hash_of, range(3))
        first = lineage.of([], [start])
        assert lineage.of([start], [left]) == lineage.of([start], [right]) == first

    def test_memory_is_bounded(self):
        lineage = Lineage()
        first = lineage.of([], [hash_of(0)])
        for number in range(1, _MAX_CHAINS):
            lineage.of([], [hash_of(number)])
        assert lineage.of([hash_of(0)], [hash_of(0)]) == first
        for number in range(1, _MAX_CHAINS + 1):
            lineage.of([], [hash_of(10_000 + number)])
        assert len(lineage._chains) == _MAX_CHAINS
        assert lineage.of([hash_of(0)], [hash_of(0)]) != first
