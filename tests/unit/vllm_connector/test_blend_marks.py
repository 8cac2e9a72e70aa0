"""Marks of documents: a table proposes the places of known documents in a prompt."""

from collections import OrderedDict
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.utils import ConstantList

from lmcache_client.vllm.blend import marks
from lmcache_client.vllm.blend.marks import START_TOKENS, MarkTable, make_mark, seed_of
from lmcache_client.vllm.blend.params import MAX_DOCUMENTS
from tests.harness.client.blend_rig import document
from tests.harness.scope import examples
from tests.harness.sidecar.wire import NAMESPACE

SEED = seed_of(NAMESPACE, None)
LARGEST_TOKEN = 1 << 31


def mark_of(tokens, num_tokens=None, seed=SEED):
    return make_mark(tokens, num_tokens or len(tokens), seed)


def table_of(*documents, **settings):
    table = MarkTable(**settings)
    table.add(map(mark_of, documents))
    return table


def places_of(table, prompt, **settings):
    return [(place.start, place.stop) for place in table.find(prompt, SEED, **settings)]


class Model:
    """A table that compares tokens, not fingerprints, and searches each token of a prompt."""

    def __init__(self, max_heads):
        self.max_heads = max_heads
        self.lengths = OrderedDict()

    def add(self, tokens):
        if len(tokens) >= START_TOKENS:
            head = tuple(tokens[:START_TOKENS])
            lengths = self.lengths.pop(head, [])
            if len(tokens) in lengths:
                lengths.remove(len(tokens))
            self.lengths[head] = [*lengths, len(tokens)][-8:]
            if len(self.lengths) > self.max_heads:
                self.lengths.popitem(last=False)

    def find(self, prompt):
        starts = range(len(prompt) - START_TOKENS + 1)
        prompt = tuple(prompt)
        heads = {start: self.lengths.get(prompt[start : start + START_TOKENS]) for start in starts}
        matches = [start for start in starts if heads[start]]
        places = []
        while matches and len(places) < MAX_DOCUMENTS:
            start, *rest = matches
            limit = min(rest[0] if rest else len(prompt), len(prompt) - 1)
            before_next = [n for n in heads[start] if start + n <= limit]
            before_end = [n for n in heads[start] if start + n < len(prompt)]
            later = [match for match in rest if match >= start + START_TOKENS]
            end = min([*later, len(prompt) - 1])
            stop = start + max(before_next or before_end or [end - start])
            places.append((start, stop))
            matches = [match for match in rest if match >= stop]
        return places


TOKENS = st.sampled_from([0, 1, 7, LARGEST_TOKEN])
PIECES = st.one_of(
    st.tuples(TOKENS, st.integers(1, 150)).map(lambda run: [run[0]] * run[1]),
    st.lists(TOKENS, min_size=1, max_size=20),
    st.integers(0, 3).map(lambda number: document(number, 70)),
)
"""Repeated tokens, few tokens in any order, and documents that prompts share."""
PROMPTS = st.lists(PIECES, max_size=8).map(lambda pieces: list(chain(*pieces)))


@settings(max_examples=examples(240))
@given(st.data(), st.integers(1, 4), st.lists(PROMPTS, min_size=1, max_size=4))
def test_search_agrees_with_a_comparison_of_all_tokens(data, max_fingerprints, prompts):
    table, model = MarkTable(max_fingerprints), Model(max_fingerprints)
    for prompt in prompts:
        for _ in range(data.draw(st.integers(0, 6), "documents")):  # nested, overlapping, short or the prompt
            start = data.draw(st.integers(0, len(prompt)), "start")
            part = prompt[start : data.draw(st.integers(start, len(prompt)), "stop")]
            if len(part) >= START_TOKENS:
                table.add([mark_of(part)])
            else:
                assert mark_of(part) is None
            model.add(part)
        for searched in prompts:
            assert places_of(table, searched) == model.find(searched)
    assert len(table) == len(model.lengths)
    copy = MarkTable(max_fingerprints)
    copy.add(table.marks())
    assert copy.marks() == table.marks()


def test_document_ends_before_the_next_one_if_a_length_allows_it():
    first, second = document(1, 300), document(2, 100)
    table = table_of(first[:80], first[:200], first, second)
    assert places_of(table, [*first[:200], *second, 5]) == [(0, 200), (200, 300)]
    assert places_of(table, [*first[:220], *second, 5]) == [(0, 200), (220, 320)]
    assert places_of(table, [*first, *second, 5]) == [(0, 300), (300, 400)]
    assert places_of(table, first[:90]) == [(0, 80)]


def test_longest_document_counts_if_another_one_is_nested_in_it():
    outer, inner = document(1, 300), document(2, 100)
    outer[50:150] = inner
    assert places_of(table_of(outer, inner), [9, *outer, 5]) == [(1, 301)]


@pytest.mark.parametrize("num_tokens", [START_TOKENS, 65, 500])
def test_prompt_that_is_a_document_leaves_a_token_of_question(num_tokens):
    prompt = document(1, num_tokens)
    assert places_of(table_of(prompt), prompt) == [(0, num_tokens - 1)]
    assert places_of(table_of(prompt), [*prompt, 5]) == [(0, num_tokens)]


def test_longer_document_is_proposed_up_to_the_question():
    assert places_of(table_of(document(1, 500)), [3, 4, *document(1, 500)[:100]]) == [(2, 101)]


def test_next_document_ends_one_whose_lengths_are_all_too_long():
    first, second = document(1, 500), document(2, 100)
    assert places_of(table_of(first, second), [3, *first[:90], *second, 5]) == [(1, 91), (91, 191)]


def test_next_document_ends_an_earlier_prompt():
    """Unlike documents, prompts go on behind what other prompts repeat."""
    first, second = document(1, 300), document(2, 100)
    prompt = [*first[:80], *second, *document(3, 300)]
    assert places_of(MarkTable(), prompt, more=table_of(first, second)) == [(0, 80), (80, 180)]
    assert places_of(table_of(second), prompt, more=table_of(first)) == [(0, 80), (80, 180)]
    assert places_of(table_of(first), prompt, more=table_of(second)) == [(0, 300)]


@pytest.mark.parametrize("token", [-1, -(1 << 70), 1 << 64])
def test_numbers_that_are_no_tokens_hide_no_document(token):
    prompt = [token, *document(1, 100), token]
    assert places_of(table_of(document(1, 100)), prompt) == [(1, 101)]
    assert places_of(table_of(prompt), [3, *prompt, 3]) == [(1, 103)]


@pytest.mark.parametrize("num_tokens", [0, 1, START_TOKENS - 1])
def test_short_documents_have_no_mark_and_short_prompts_no_documents(num_tokens):
    assert mark_of(document(1, num_tokens), num_tokens) is None
    assert places_of(table_of(document(1, 100)), document(1, 100)[:num_tokens]) == []


def test_document_of_2_to_the_24_tokens_has_no_mark():
    assert mark_of(document(1, 64), (1 << 24) - 1) & 0xFFFFFF == (1 << 24) - 1
    assert mark_of(document(1, 64), 1 << 24) is None


def test_prompt_of_one_repeated_token_has_at_most_256_documents():
    assert places_of(table_of([7] * 100), [7] * 950) == [(n, n + 100) for n in range(0, 900, 100)]
    places = places_of(table_of([7] * 100), [7] * 40_000)
    assert len(places) == MAX_DOCUMENTS
    assert places[-1] == (25_500, 25_600)
    assert places_of(table_of([8] * 100), [7] * 40_000) == []


@pytest.mark.parametrize("start", [-64, -63, -1, 0, 1])
def test_documents_are_found_across_the_blocks_of_a_search(start):
    start += marks._BLOCK
    prompt = [*[3] * start, *document(1, 100), *[4] * marks._BLOCK, *document(1, 100), 5]
    second = start + 100 + marks._BLOCK
    for tokens in prompt, ConstantList(prompt):
        assert places_of(table_of(document(1, 100)), tokens) == [(start, start + 100), (second, second + 100)]


def test_latest_eight_lengths_of_equal_heads_are_known():
    lengths = range(100, 200, 10)
    table = table_of(*(document(1, n) for n in lengths))
    assert [mark & 0xFFFFFF for mark in table.marks()] == list(lengths)[2:]
    table.add([mark_of(document(1, 120))])
    assert [mark & 0xFFFFFF for mark in table.marks()] == [*range(130, 200, 10), 120]
    table.add([mark_of(document(1, 150))])
    assert [mark & 0xFFFFFF for mark in table.marks()] == [130, 140, *range(160, 200, 10), 120, 150]
    assert len(table) == 1


def test_least_recently_added_document_leaves_first():
    first, second, third = (document(number, 100) for number in range(3))
    table = table_of(first, second, max_fingerprints=2)
    table.add(map(mark_of, [first, third]))
    places = {number: places_of(table, [*part, 5]) for number, part in enumerate([first, second, third])}
    assert places == {0: [(0, 100)], 1: [], 2: [(0, 100)]}
    table.clear()
    assert not table.marks()
    assert places_of(table, [*first, 5]) == []


@pytest.mark.parametrize("shift", [0, 30])  # all have the same upper, or lower, 22 bits
def test_marks_that_share_a_bucket_hide_no_document(shift):
    mark = mark_of(document(1, 100))
    fingerprints = [mark >> 24 ^ number << shift for number in range(1, 600)]
    neighbours = [fingerprint << 24 | 100 for fingerprint in fingerprints]
    table = MarkTable(max_fingerprints=300)
    table.add([mark, *neighbours[:299]])
    assert places_of(table, [*document(1, 100), 5]) == [(0, 100)]
    table.add(neighbours)
    assert places_of(table, [*document(1, 100), 5]) == []
    table.add([mark])
    table.add(number << 42 | number << 24 | 100 for number in range(1, 300))  # the neighbours leave
    assert len(table) == 300
    assert places_of(table, [*document(1, 100), 5]) == [(0, 100)]


def test_marks_with_impossible_lengths_are_ignored():
    table = MarkTable()
    table.add([0, 63, (1 << 64) - (1 << 24), ((1 << 64) - 1) >> 24 << 24 | 63])
    assert len(table) == 0
    table.add([(1 << 64) - 1])
    assert table.marks() == [(1 << 64) - 1]


def test_second_table_is_searched_too():
    first, second = document(1, 100), document(2, 100)
    prompt = [*first, *second, 5]
    both = [(0, 100), (100, 200)]
    assert places_of(table_of(first), prompt, more=table_of(second)) == both
    assert places_of(MarkTable(), prompt, more=table_of(first, second)) == both
    assert places_of(table_of(first), prompt, more=MarkTable()) == both[:1]
    assert places_of(table_of(first, second), prompt, more=table_of(first[:70])) == both
    assert places_of(table_of(first[:70]), prompt, more=table_of(first)) == both[:1]


@pytest.mark.parametrize("other", [seed_of(NAMESPACE, "tenant"), seed_of(b"m" * 32, None)])
def test_other_tenants_and_models_find_nothing(other):
    table = table_of(document(1, 100))
    assert table.find([*document(1, 100), 5], other) == []
    assert seed_of(NAMESPACE, "") == SEED
    assert seed_of(NAMESPACE, "\ud800") != SEED  # a client chooses the salt
