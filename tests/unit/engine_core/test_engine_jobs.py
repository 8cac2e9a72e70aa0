"""Arithmetic of loads and stores for all alignments, and messages between processes."""

import functools
import itertools
import math
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.core.blend_jobs import Blended, BlendStep
from lmcache_client.core.grid import Grid
from lmcache_client.core.jobs import LoadJob, Offer, StepMeta, WorkerReport
from lmcache_client.core.parts import PartAnswer, PartedReport
from lmcache_client.core.waiting import PrefillRate
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import Found
from tests.harness.client.scheduler_rig import IDENTITY

ANSWER = PartAnswer(1, (b"",), 0, is_probing=False)


def make_grid(chunk_tokens, block_tokens, hash_tokens):
    chunk_tokens = math.lcm(chunk_tokens, block_tokens, hash_tokens)
    return Grid(chunk_tokens, hash_tokens, (KVGroup(0, block_tokens, 4096),))


GRIDS = st.builds(
    make_grid,
    chunk_tokens=st.sampled_from([32, 96, 256]),
    block_tokens=st.sampled_from([16, 32, 48]),
    hash_tokens=st.sampled_from([8, 16]),
)


@given(GRIDS, st.integers(0, 40), st.integers(1, 3000), st.integers(0, 12))
def test_load_covers_exactly_the_missing_leased_blocks(grid, computed_blocks, num_tokens, num_leased):
    computed = min(computed_blocks, (num_tokens - 1) // grid.step_tokens) * grid.step_tokens
    num_loaded = grid.loadable_tokens(computed, num_tokens, num_leased)
    end = computed + num_loaded

    assert end % grid.step_tokens == 0
    assert end < num_tokens, "at least a token must remain to compute"
    if num_loaded:
        assert end <= num_leased * grid.chunk_tokens
        is_all_leased = end == num_leased * grid.chunk_tokens
        assert is_all_leased or num_tokens - end <= grid.step_tokens, "no further block must fit"
    else:
        max_loadable = min(
            num_leased * grid.chunk_tokens, (num_tokens - 1) // grid.step_tokens * grid.step_tokens
        )
        assert max_loadable <= computed, "all loadable tokens must be offered"

    blocks = [1000 + i for i in range(math.ceil(num_tokens / grid.step_tokens))]
    found_rows = Found(7 * np.arange(num_leased), np.arange(num_leased, dtype=np.uint64))
    job = LoadJob.from_offer("r", grid, Offer(computed, num_loaded, (found_rows,)), num_loaded, [blocks])
    loaded = {}
    for piece in job.pieces() if num_loaded else ():
        chunk = found_rows.slots().index(piece.slot)
        for offset, block in enumerate(piece.blocks):
            token = chunk * grid.chunk_tokens + (piece.first_block + offset) * grid.step_tokens
            loaded[token] = block
        assert 0 < len(piece.blocks) <= grid.blocks_per_chunk(grid.groups[0]) - piece.first_block
    wanted = range(computed, end, grid.step_tokens)
    assert loaded == {token: blocks[token // grid.step_tokens] for token in wanted}
    assert job.blocks == tuple(loaded.values())
    assert not num_loaded or job.groups[0].found.rows[0] == 7 * (computed // grid.chunk_tokens), (
        "earlier chunks must not be in the job"
    )


SMALL, LARGE = KVGroup(0, 16, 4096), KVGroup(2, 32, 4096)


def test_load_ends_at_a_block_edge_of_all_groups():
    assert make_grid(256, 32, 32).loadable_tokens(33, 600, 2) == 0, "the engine's own hit ends inside a block"
    grid = Grid(64, 16, (SMALL, LARGE))
    assert grid.loadable_tokens(0, 65, 1) == 64
    assert grid.loadable_tokens(0, 63, 1) == 32, "48 is an edge of only the small blocks"
    assert grid.loadable_tokens(16, 200, 3) == 0, "the engine's own hit ends inside a large block"


def test_load_job_states_whether_it_fails_by_block():
    window = KVGroup(0, 32, 4096, 40, GroupKind.SLIDING_WINDOW)
    for groups, expected in [((SMALL,), True), ((SMALL, LARGE), False), ((window,), False)]:
        failing = LoadJob.failing("r", Grid(64, 32, groups), ([100, 101], [0], [500]))
        assert failing.fails_by_block == expected


@given(GRIDS, st.integers(0, 400), st.integers(0, 4000))
def test_full_chunks_have_all_hashes_and_tokens(grid, num_hashes, num_tokens):
    chunks = grid.num_full_chunks(num_hashes, num_tokens)
    assert chunks * grid.chunk_tokens <= min(num_tokens, num_hashes * grid.hash_tokens)
    assert (chunks + 1) * grid.chunk_tokens > min(num_tokens, num_hashes * grid.hash_tokens)
    hashes = [b"%d" % i for i in range(num_hashes)]
    chunk_hashes = grid.chunk_hashes(hashes, 0, chunks)
    assert chunk_hashes == [
        hashes[(c + 1) * grid.chunk_tokens // grid.hash_tokens - 1] for c in range(chunks)
    ]


def test_prefill_rate_counts_overlapping_steps_once():
    rate = PrefillRate()
    assert rate.begin(PrefillRate.MIN_STEP_TOKENS - 1, now=0) == 0
    first, second = rate.begin(1000, now=0), rate.begin(1000, now=0.1)  # scheduled during the first step
    rate.end(first, now=1)
    assert rate.tokens_per_second == pytest.approx(1000)
    rate.end(second, now=2)
    assert rate.tokens_per_second == pytest.approx(1000)
    rate.end(77, now=3)
    assert rate.tokens_per_second == pytest.approx(1000)


def test_worker_reports_of_ranks_are_added():
    first = WorkerReport(Counter({1: 1, 2: 1}), {"a"}, timed_step=3)
    second = WorkerReport(Counter({1: 1}), {"b"}, timed_step=3)
    combined = first.aggregate(second)
    assert combined == WorkerReport(Counter({1: 2, 2: 1}), {"a", "b"}, 3)
    assert not WorkerReport()


def test_reports_of_several_parts_keep_their_fields_in_any_order():
    plain = WorkerReport(Counter({1: 1}), {"a"}, timed_step=3, identity=IDENTITY)
    first = PartedReport(Counter({1: 1}), incomplete={1}, answers={"a": {1: ANSWER}})
    second = PartedReport(incomplete={2}, answers={"a": {2: ANSWER}, "b": {2: ANSWER}})
    answers = {"a": {1: ANSWER, 2: ANSWER}, "b": {2: ANSWER}}
    expected = PartedReport(Counter({1: 2}), {"a"}, 3, IDENTITY, incomplete={1, 2}, answers=answers)
    for reports in itertools.permutations([plain, WorkerReport(), first, second]):
        assert functools.reduce(lambda merged, report: merged.aggregate(report), reports) == expected
    assert type(plain.aggregate(WorkerReport())) is WorkerReport
    assert not PartedReport()
    assert PartedReport(incomplete={1})
    assert PartedReport(answers={"a": {1: ANSWER}})


def test_messages_arrive_as_they_were_sent_with_and_without_blended_prompts():
    blended = Blended(300, 60, 20)
    for message in (
        StepMeta(is_idle=True),
        StepMeta(blend=BlendStep([], ["r"], ["s"], 256)),
        WorkerReport(Counter({1: 2}), {"r"}, 3),
        WorkerReport(blends_placed=Counter({"r": 1}), blended={"r": blended}),
        WorkerReport(identity=replace(IDENTITY, can_blend=True)),
        IDENTITY,
    ):
        assert pickle.loads(pickle.dumps(message, 5)) == message
    reports = WorkerReport(blends_placed=Counter({"r": 1})), WorkerReport(blended={"s": blended})
    first, second = map(pickle.loads, map(pickle.dumps, reports))
    assert first.aggregate(second) == WorkerReport(blends_placed=Counter({"r": 1}), blended={"s": blended})
