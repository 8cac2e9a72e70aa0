"""The scheduler side with manual requests and steps, in the formats of both model runners."""

from types import SimpleNamespace

import pytest

from lmcache_store import keys
from tests.harness.client.scheduler_rig import (
    Rig,
    blocks,
    chunk_ranges,
    hashes,
    job_ids,
    make_identity,
    make_request,
)
from tests.harness.sidecar.wire import NAMESPACE


def test_engine_hits_are_stored_only_if_not_cached(rig):
    rig.stored(2)
    request = rig.arrive(make_request(200))
    assert rig.begin(request, computed=192) == 0
    meta = rig.step(new=[("r", blocks(7), 192, 8)])
    assert chunk_ranges(meta) == [(2, 3)]


@pytest.mark.parametrize(
    ("num_tokens", "computed", "fields"),
    [
        pytest.param(63, 0, {}, id="no full chunk"),
        pytest.param(200, 192, {}, id="full hit in the engine"),
        pytest.param(200, 0, {"resumable": True}, id="resumable, which is not cached"),
    ],
)
def test_request_with_nothing_to_load_does_not_wait(rig, num_tokens, computed, fields):
    request = make_request(num_tokens, **fields)
    rig.scheduler.on_new_request(request)
    assert rig.match(request, computed) == (0, False)


def test_request_that_skips_reads_is_stored_but_not_loaded(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200, skip_reading_prefix_cache=True))
    assert rig.match(request) == (0, False)
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 0, 200)])) == [(0, 3)]


def test_salt_and_adapter_are_in_keys_and_unknown_adapter_is_not_cached(rig):
    rig.stored(1)
    rig.stored(2, lora_fingerprint=b"L", cache_salt="s")
    rig.extra_keys |= {"known": ((0, b"L"),), "unknown": None}
    known = rig.arrive(make_request(200, "a", cache_salt="s", lora_request="known"))
    assert rig.match(known) == (128, True)
    rig.step(new=[("a", blocks(7), 0, 200)])
    unknown = rig.arrive(make_request(200, "b", cache_salt="s", lora_request="unknown"))
    assert rig.match(unknown) == (0, False)
    assert rig.step(new=[("b", blocks(7), 0, 200)]).stores == []


def test_chunk_is_stored_in_the_step_that_completes_it(rig):
    request = rig.arrive(make_request(200))
    assert chunk_ranges(rig.step(new=[("r", blocks(4), 0, 100)])) == [(0, 1)]
    meta = rig.step(cached=[("r", blocks(3, 104), 100, 100, False)])
    assert chunk_ranges(meta) == [(1, 3)]
    (store,) = meta.stores[0].groups
    assert store.blocks == tuple(blocks(4, 102))
    assert store.keys == b"".join(NAMESPACE + key for key in keys.chunk_keys([b"p3", b"p5"]))
    assert meta.stores[0].tenant == b""
    # Decoding: token 255 completes chunk 3.
    request.block_hashes = hashes(256)
    assert chunk_ranges(rig.step(cached=[("r", blocks(1, 107), 200, 55, False)])) == []
    assert chunk_ranges(rig.step(cached=[("r", None, 255, 1, False)])) == [(3, 4)]


def test_draft_tokens_are_not_stored(rig):
    rig.arrive(make_request(128))
    assert chunk_ranges(rig.step(new=[("r", blocks(5), 0, 66)], drafts={"r": [1, 2, 3]})) == []


def test_chunks_found_by_the_lookup_are_not_stored_again(rig):
    rig.stored(2)
    request = rig.arrive(make_request(200))
    assert rig.begin(request) == 128
    rig.step()
    rig.report(received=["r"])
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 128, 72)])) == [(2, 3)]


def test_failed_load_is_not_retried_and_its_chunks_are_stored(rig):
    request = rig.loading()
    rig.report(failed=["r"], received=["r"])
    assert rig.match(request) == (0, False)
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 0, 200)])) == [(0, 3)]


def test_request_preempted_between_steps_reclaims_its_stores(rig):
    """vLLM resets its prefix cache: it matches the request again before it announces the preemption."""
    request = rig.computing()
    jobs_in_progress = job_ids(rig.step(new=[("r", blocks(7), 0, 200)]))
    rig.match(request)
    rig.drain_lookups()
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(7, 200), 0)
    meta = rig.step(preempted=["r"], cached=[("r", blocks(7, 200), 0, 200, True)])
    assert jobs_in_progress == meta.reclaimed
    assert chunk_ranges(meta) == [(0, 3)]


def test_preemption_keeps_stores_of_requests_that_share_blocks(rig):
    """Both requests have the engine's own hit, which ends inside a chunk."""
    for name in "first", "second":
        request = rig.arrive(make_request(200, name))
        rig.begin(request, computed=32)
    metas = [rig.step(new=[(name, blocks(7), 32, 168)]) for name in ("first", "second")]
    first, second = map(job_ids, metas)
    assert first != second
    assert rig.step(preempted=["first"]).reclaimed == first


def test_resumed_request_uses_its_new_block_table(rig):
    rig.arrive(make_request(200))
    assert chunk_ranges(rig.step(new=[("r", blocks(3), 0, 60)])) == []
    meta = rig.step(cached=[("r", blocks(7, 200), 0, 200, True)])
    assert meta.stores[0].groups[0].blocks == tuple(blocks(6, 200))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_are_held_until_all_ranks_end_their_stores(num_ranks):
    rig = Rig(make_identity(num_columns=num_ranks))
    request = rig.arrive(make_request(200))
    (job,) = rig.step(new=[("r", blocks(7), 0, 200)]).stores
    request.num_computed_tokens = 200
    assert rig.finish(request) is True
    assert (rig.step().held, rig.step().held) == (["r"], [])
    for _ in range(num_ranks):
        rig.report(ended=[job.job_id])
    rig.report(sent=["r"])
    assert rig.scheduler._states == {}
    rig.scheduler.go_offline()


def test_blocks_are_not_held_after_all_stores_ended(rig):
    request = rig.arrive(make_request(200))
    (job,) = rig.step(new=[("r", blocks(7), 0, 200)]).stores
    rig.report(ended=[job.job_id])
    request.num_computed_tokens = 200
    assert rig.finish(request) is False
    assert rig.scheduler._states == {}


@pytest.mark.parametrize(("num_tokens", "stored"), [(192, []), (193, [(2, 3)])])
def test_finished_request_stores_no_chunk_with_its_last_token(rig, num_tokens, stored):
    """With async scheduling the engine counts the last token as computed, but it has no KV yet."""
    request = rig.arrive(make_request(191))
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 0, 191)])) == [(0, 2)]
    request.num_tokens = request.num_computed_tokens = num_tokens
    request.block_hashes = hashes(num_tokens)
    rig.finish(request)
    assert chunk_ranges(rig.step()) == stored


def test_abort_during_a_load_frees_blocks_and_keeps_the_lease(rig):
    request = rig.loading()
    assert rig.finish(request) is False
    rig.step()
    rig.drain_lookups()
    assert rig.session.leased == {"r"}, "the copy still reads the slots"
    rig.report(received=["r"])
    rig.drain_lookups()
    assert (rig.session.leased, rig.scheduler._states) == (set(), {})


def test_offered_load_that_cannot_be_planned_fails_all_blocks(rig):
    request = rig.matched()
    rig.scheduler.go_offline()
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(6), 192)
    (load,) = rig.step().loads
    assert list(load.pieces()) == []
    assert load.blocks == tuple(blocks(6)), "all blocks must fail"
    assert rig.finish(request) is False


def test_block_tables_are_retained_between_steps_of_vllm_0_29(rig):
    request = rig.arrive(make_request(200))

    def step(computed, scheduled, shown_tables):
        cached = SimpleNamespace(req_ids=["r"], new_block_ids=[None], num_computed_tokens=[computed])
        return rig.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": scheduled},
                total_num_scheduled_tokens=scheduled,
                scheduled_spec_decode_tokens={},
                kv_connector_block_state=SimpleNamespace(block_ids=shown_tables, boundary_state_offloads={}),
            )
        )

    assert not step(0, 60, {"r": (blocks(2),)}).stores
    (job,) = step(60, 10, {}).stores
    assert job.groups[0].blocks == tuple(blocks(2))
    (job,) = step(70, 130, {"r": (blocks(7),)}).stores
    assert job.groups[0].blocks == tuple(blocks(7)[2:6])
    rig.finish(request)
    assert not rig.scheduler._tables
