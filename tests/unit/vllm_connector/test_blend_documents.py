"""Keys and claims of a prompt's documents."""

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from lmcache_client.core.requests import Computing, RequestState, Ticket
from lmcache_client.core.stores import Stores
from lmcache_client.vllm.blend.documents import (
    ExactView,
    find_claim,
    hash_document,
    key_hashes,
    num_keys,
    slice_tokens,
)
from lmcache_client.vllm.blend.params import BlendParams
from lmcache_store import keys
from lmcache_store.tiers.memory.contracts import Found
from tests.harness.client.blend_rig import FakeRequest, document, fake_hashes
from tests.harness.client.scheduler_rig import GRID
from tests.harness.sidecar.wire import NAMESPACE


def rows(num_rows):
    return Found(np.arange(num_rows), np.ones(num_rows, np.uint64))


def claim(*lengths, known, start=0, begin=0, exact=0, min_tokens=1, question=20, is_detected=False):
    """The claim of documents of these lengths, of which ``known`` rows are stored."""
    edges = np.cumsum([start, *lengths]).tolist()
    params = BlendParams(tuple(map(range, edges, edges[1:])), "attended", 0.15, is_detected)
    num_tokens = edges[-1] + question
    return find_claim(params, GRID, begin, rows(exact), list(map(rows, known)), min_tokens, num_tokens)


def places(result):
    return [
        (segment.start, segment.begin, segment.end, len(segment.found.rows)) for segment in result.segments
    ]


def real_request(tokens, salt):
    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    hasher = kv_cache_utils.get_request_block_hasher(32, function)
    return Request("r", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher)


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("num_tokens", [31, 32, 200])
def test_hashes_of_a_document_are_those_of_a_prompt_with_only_the_document(salt, num_tokens):
    alone = real_request(document(1, num_tokens), salt)
    asking = real_request(document(2) + document(1), salt)
    view, exact_hashes = ExactView(asking), list(asking.block_hashes)
    asking.cache_salt = "blend"
    asking.block_hashes.clear()
    asking.update_block_hashes()
    assert hash_document(document(1, num_tokens), view, 32, "sha256") == list(map(bytes, alone.block_hashes))
    assert view.block_hashes == exact_hashes != asking.block_hashes
    assert (view.cache_salt, view.num_tokens, view.request_id) == (salt, 400, "r")


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(0, ()), (31, ()), (32, (0,)), (63, (0,)), (64, (1,)), (127, (1, 2)), (200, (1, 3, 5))],
)
def test_keys_of_a_document_are_those_of_its_chunks_and_of_its_tail(num_tokens, blocks):
    hashes = fake_hashes(document(1, num_tokens))
    assert key_hashes(GRID, hashes) == [hashes[block] for block in blocks]
    assert num_keys(GRID, num_tokens) == len(blocks)


def test_last_row_ends_with_the_last_full_block():
    result = claim(100, 200, known=(2, 4), start=10)
    assert places(result) == [(10, 10, 106, 2), (110, 110, 302, 4)]
    assert (result.begin, result.num_exact) == (0, 0)
    assert places(claim(100, 200, known=(2, 2))) == [(0, 0, 96, 2), (100, 100, 228, 2)]


def test_exact_kv_replaces_the_beginning_of_a_document():
    result = claim(200, 200, known=(4, 4), exact=2)
    assert places(result) == [(0, 0, 128, 2), (0, 128, 192, 4), (200, 200, 392, 4)]
    assert result.num_exact == 128
    result = claim(200, 200, known=(4, 4), exact=4)
    assert places(result) == [(0, 0, 256, 4), (200, 256, 392, 4)]


def test_tokens_that_the_engine_has_are_not_placed():
    result = claim(200, 200, known=(4, 4), begin=224, exact=2)
    assert places(result) == [(200, 224, 392, 4)]
    assert (result.begin, result.num_exact) == (224, 0)
    assert claim(200, 200, known=(4, 4), begin=416) is None


def test_documents_without_rows_and_identical_documents_are_fine():
    assert places(claim(200, 200, 200, known=(0, 4, 4))) == [(200, 200, 392, 4), (400, 400, 592, 4)]


@pytest.mark.parametrize(
    ("case", "min_tokens", "is_claimed"),
    [
        ({"known": (0, 4)}, 192, True),
        ({"known": (0, 4)}, 193, False),
        ({"known": (4, 4)}, 193, False),  # the first document's KV is exact
        ({"known": (0, 3)}, 1, False),  # 192 of 400 tokens lack
        ({"known": (0, 2)}, 1, False),
        ({"known": (0, 2), "exact": 2}, 1, True),
        ({"known": (0, 2), "begin": 192}, 1, True),
        ({"known": (4, 0)}, 1, False),
        ({"known": (4, 4), "exact": 7}, 1, False),
        ({"known": (0, 0)}, 1, False),
        ({"known": (0, 2), "start": 640, "exact": 10}, 1, False),  # other tokens before the documents
        ({"known": (0, 2), "start": 600, "exact": 10}, 1, False),
        ({"known": (0, 2), "start": 560, "exact": 11}, 1, True),
    ],
)
def test_prompt_is_blended_if_enough_is_known_that_only_blending_reuses(case, min_tokens, is_claimed):
    lengths = (180, 200) if case["known"] == (0, 4) else (200, 200)
    assert (claim(*lengths, min_tokens=min_tokens, **case) is not None) is is_claimed


def test_documents_that_were_found_are_the_tokens_with_stored_kv():
    """The rest of the prompt may be text of any kind."""
    result = claim(200, 300, 100, known=(4, 3, 0), start=40, is_detected=True)
    assert places(result) == [(40, 40, 232, 4), (240, 240, 432, 3)]
    assert result.params.documents == (range(40, 232), range(240, 432))
    assert result.rows == (range(4), range(3), range(0))


def test_exact_kv_is_no_part_of_documents_that_were_found():
    result = claim(200, 200, 200, known=(4, 4, 4), exact=5, is_detected=True)
    assert places(result) == [(0, 0, 320, 5), (200, 320, 392, 4), (400, 400, 592, 4)]
    assert result.params.documents == (range(320, 392), range(400, 592))
    assert result.rows == (range(0), range(1, 4), range(4))
    assert (result.num_document_tokens, result.num_exact_in_documents) == (264, 0)


@pytest.mark.parametrize(
    ("case", "is_claimed"),
    [
        ({"known": (4, 4), "question": 368}, True),  # 384 of 768 tokens lack KV
        ({"known": (4, 4), "question": 369}, False),
        ({"known": (4, 4), "start": 384, "exact": 6, "question": 364}, True),
        ({"known": (4, 4), "start": 384, "begin": 384, "question": 364}, True),
        ({"known": (4, 4), "start": 384}, False),  # the first 384 tokens have no KV
        ({"known": (4, 0)}, False),  # a prefix
        ({"known": (0, 0)}, False),
        ({"known": (4, 4), "begin": 416}, False),
        ({"known": (4, 4), "min_tokens": 192}, True),
        ({"known": (4, 4), "min_tokens": 193}, False),
    ],
)
def test_half_of_all_tokens_must_be_known_if_the_engine_has_found_the_documents(case, is_claimed):
    assert (claim(200, 200, is_detected=True, **case) is not None) is is_claimed


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 1000), (300, 700), (744, 256), (900, 256), (1000, 256), (5000, 256)]
)
def test_slices_use_what_a_step_leaves_but_at_least_some_tokens(num_tokens, expected):
    assert slice_tokens(1000, num_tokens) == expected
    assert slice_tokens(100, num_tokens) == 100


def tail_of(num_tokens, **fields):
    """The rows of a document's tail, as (key, number of the chunk, blocks)."""
    request = FakeRequest(document(1, num_tokens))
    state = RequestState(request, Ticket("r", [], NAMESPACE))
    vars(state).update(fields)
    jobs = Stores(GRID, 1, Computing()).plan_tail(state, list(range(100, 110)), num_tokens)
    assert state.num_stores == len(jobs)
    return [(part.keys, part.first_chunk, part.blocks) for job in jobs for part in job.groups]


@pytest.mark.parametrize(
    ("num_tokens", "tail"), [(32, (0, 0, (100, 100))), (100, (2, 1, (102, 102))), (127, (2, 1, (102, 102)))]
)
def test_tail_is_a_whole_row_that_repeats_its_last_block(num_tokens, tail):
    block, chunk, blocks = tail
    ((key, *stored),) = tail_of(num_tokens)
    assert stored == [chunk, blocks]
    hashes = fake_hashes(document(1, num_tokens))
    assert key == NAMESPACE + keys.chunk_keys([hashes[block]])[0]
    assert hashes[block] == key_hashes(GRID, hashes)[-1]


@pytest.mark.parametrize("num_tokens", [0, 31, 64, 95, 128])
def test_document_of_whole_chunks_has_no_tail(num_tokens):
    assert tail_of(num_tokens) == []


def test_no_tail_is_stored_of_kv_that_may_be_blended():
    assert tail_of(100, is_exact=False) == []


def test_exact_lookups_never_ask_for_a_tail():
    """Exact keys are those of prefixes of whole chunks, and a hash covers the length of its prefix."""
    hashes = fake_hashes(document(1, 640))
    exact = set(GRID.chunk_hashes(hashes, 0, 10))
    tails = {key_hashes(GRID, hashes[:end])[-1] for end in range(1, 20, 2)}
    assert len(exact) == len(tails) == 10
    assert exact.isdisjoint(tails)
