"""The scheduler side against requests and steps made by hand, in the shapes of both model runners."""

from types import SimpleNamespace

import pytest

from lmcache import keys
from lmcache.engines.core.scheduler import SchedulerSide
from tests.harness.scheduler_rig import (
    Rig,
    blocks,
    chunk_ranges,
    hashes,
    job_ids,
    make_identity,
    make_request,
)
from tests.harness.wire import NAMESPACE


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()


def test_a_hit_is_offered_loaded_and_its_lease_ended(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    assert rig.match(request) == (192, True), "asking again changes nothing"
    rig.allocate(request, blocks(6), 192)
    (load,) = rig.step().loads
    assert load.blocks == tuple(blocks(6))
    assert [(piece.slot.row, piece.first_block, piece.blocks) for piece in load.pieces()] == [
        (0, 0, (100, 101)),
        (1, 0, (102, 103)),
        (2, 0, (104, 105)),
    ]
    assert rig.step().loads == []
    rig.drain_lookups()
    assert rig.session.leased == {"r"}
    rig.report(received=["r"])
    rig.drain_lookups()
    assert rig.session.leased == set()


def test_a_local_hit_inside_a_chunk_is_loaded_from_there(rig):
    rig.stored(2)
    request = rig.arrive(make_request(130))
    assert rig.match(request, computed=32) == (96, True)
    rig.allocate(request, blocks(4), 96)
    (load,) = rig.step().loads
    assert load.blocks == (101, 102, 103)
    assert [(piece.first_block, piece.blocks) for piece in load.pieces()] == [(1, (101,)), (0, (102, 103))]


def test_what_the_engine_has_itself_is_stored_only_if_it_is_not_there(rig):
    rig.stored(2)
    request = rig.arrive(make_request(200))
    assert rig.match(request, computed=192) == (0, False)
    rig.allocate(request, blocks(7), 0)
    meta = rig.step(new=[("r", blocks(7), 192, 8)])
    assert chunk_ranges(meta) == [(2, 3)]


def test_the_engine_may_take_less_than_was_offered(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 96)
    (load,) = rig.step().loads
    assert load.blocks == (100, 101, 102)


def test_a_prompt_without_a_full_chunk_waits_for_nothing(rig):
    request = make_request(63)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (0, False)


def test_a_local_hit_of_everything_waits_for_nothing(rig):
    request = make_request(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request, computed=192) == (0, False)


def test_a_request_that_skips_reads_is_stored_but_not_loaded(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200, skip_reading_prefix_cache=True))
    assert rig.match(request) == (0, False)
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 0, 200)])) == [(0, 3)]


def test_salt_and_adapter_are_part_of_the_key_and_an_unknown_adapter_is_not_cached(rig):
    rig.stored(1)
    rig.stored(2, lora_fingerprint=b"L", cache_salt="s")
    rig.extra_keys |= {"known": ((0, b"L"),), "unknown": None}
    known = rig.arrive(make_request(200, "a", cache_salt="s", lora_request="known"))
    assert rig.match(known) == (128, True)
    rig.step(new=[("a", blocks(7), 0, 200)])
    unknown = rig.arrive(make_request(200, "b", cache_salt="s", lora_request="unknown"))
    assert rig.match(unknown) == (0, False)
    assert rig.step(new=[("b", blocks(7), 0, 200)]).stores == []


def test_every_chunk_is_stored_in_the_step_that_completes_it(rig):
    request = rig.arrive(make_request(200))
    assert chunk_ranges(rig.step(new=[("r", blocks(4), 0, 100)])) == [(0, 1)]
    meta = rig.step(cached=[("r", blocks(3, 104), 100, 100, False)])
    assert chunk_ranges(meta) == [(1, 3)]
    (store,) = meta.stores[0].groups
    assert store.blocks == tuple(blocks(4, 102))
    assert store.keys == b"".join(NAMESPACE + keys.chunk_key(chunk_hash) for chunk_hash in (b"p3", b"p5"))
    assert meta.stores[0].tenant == b""
    # Decoding: token 255 completes chunk 3.
    request.block_hashes = hashes(256)
    assert chunk_ranges(rig.step(cached=[("r", blocks(1, 107), 200, 55, False)])) == []
    assert chunk_ranges(rig.step(cached=[("r", None, 255, 1, False)])) == [(3, 4)]


def test_drafts_that_may_be_rejected_are_not_stored(rig):
    rig.arrive(make_request(128))
    assert chunk_ranges(rig.step(new=[("r", blocks(5), 0, 66)], drafts={"r": [1, 2, 3]})) == []


def test_what_the_lookup_found_is_not_stored_again(rig):
    rig.stored(2)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (128, True)
    rig.allocate(request, blocks(4), 128)
    rig.step()
    rig.report(received=["r"])
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 128, 72)])) == [(2, 3)]


def test_a_failed_load_is_not_tried_again_and_its_chunks_are_stored(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 192)
    rig.step()
    rig.report(failed=["r"], received=["r"])
    assert rig.match(request) == (0, False)
    assert chunk_ranges(rig.step(new=[("r", blocks(7), 0, 200)])) == [(0, 3)]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_preempted_request_is_looked_up_and_stored_again(rig, runner):
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(7), 0)
    meta = rig.step(new=[("r", blocks(4), 0, 100)])
    assert chunk_ranges(meta) == [(0, 1)]
    assert rig.step(preempted=["r"]).reclaimed == job_ids(meta)
    rig.stored(1)
    assert rig.match(request) == (None, False)
    rig.drain_lookups()
    assert rig.match(request) == (64, True)
    rig.allocate(request, blocks(2, 200), 64)
    (load,) = rig.step().loads
    assert load.blocks == (200, 201)
    rig.report(received=["r"])
    table = blocks(7, 200)
    if runner == "V1":
        meta = rig.step(cached=[("r", table, 64, 136, True)])
    else:
        meta = rig.step(new=[("r", table, 64, 136)])
    assert chunk_ranges(meta) == [(1, 3)]
    assert meta.stores[0].groups[0].blocks == tuple(table[2:6])


def test_a_request_that_is_preempted_between_two_steps_gives_up_its_stores(rig):
    """vLLM resets its prefix cache: the request is asked for again before its preemption is announced."""
    request = rig.arrive(make_request(200))
    rig.match(request)
    rig.allocate(request, blocks(7), 0)
    under_way = job_ids(rig.step(new=[("r", blocks(7), 0, 200)]))
    rig.match(request)
    rig.drain_lookups()
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(7, 200), 0)
    meta = rig.step(preempted=["r"], cached=[("r", blocks(7, 200), 0, 200, True)])
    assert under_way == meta.reclaimed
    assert chunk_ranges(meta) == [(0, 3)]


def test_a_preemption_leaves_stores_of_those_who_share_its_blocks(rig):
    """Both have the engine's own hit, which ends inside a chunk."""
    for name in "one", "other":
        request = rig.arrive(make_request(200, name))
        rig.match(request, computed=32)
        rig.allocate(request, blocks(7), 0)
    metas = [rig.step(new=[(name, blocks(7), 32, 168)]) for name in ("one", "other")]
    one, other = map(job_ids, metas)
    assert one != other
    assert rig.step(preempted=["one"]).reclaimed == one


def test_a_resumed_request_has_a_new_block_table_also_when_its_preemption_was_not_announced(rig):
    rig.arrive(make_request(200))
    assert chunk_ranges(rig.step(new=[("r", blocks(3), 0, 60)])) == []
    meta = rig.step(cached=[("r", blocks(7, 200), 0, 200, True)])
    assert meta.stores[0].groups[0].blocks == tuple(blocks(6, 200))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_are_held_until_all_ranks_ended_their_stores(num_ranks):
    rig = Rig(make_identity(num_columns=num_ranks))
    request = rig.arrive(make_request(200))
    (job,) = rig.step(new=[("r", blocks(7), 0, 200)]).stores
    request.num_computed_tokens = 200
    assert rig.finish(request) is True
    assert rig.step().held == ["r"]
    assert rig.step().held == []
    for _ in range(num_ranks):
        rig.report(ended=[job.job_id])
    rig.report(sent=["r"])
    assert rig.scheduler._states == {}
    rig.scheduler.go_offline()


def test_blocks_are_not_held_when_all_stores_ended(rig):
    request = rig.arrive(make_request(200))
    (job,) = rig.step(new=[("r", blocks(7), 0, 200)]).stores
    rig.report(ended=[job.job_id])
    request.num_computed_tokens = 200
    assert rig.finish(request) is False
    assert rig.scheduler._states == {}


def test_with_async_scheduling_the_last_chunk_is_stored_at_the_end(rig):
    request = rig.arrive(make_request(200))
    (job,) = rig.step(new=[("r", blocks(8), 0, 200)]).stores
    rig.report(ended=[job.job_id])
    assert rig.step(cached=[("r", None, 200, 56, False)]).stores == [], "tokens 200.. have no hashes yet"
    request.num_tokens, request.num_computed_tokens, request.block_hashes = 257, 257, hashes(256)
    assert rig.finish(request) is True
    meta = rig.step()
    assert chunk_ranges(meta) == [(3, 4)]
    assert meta.held == ["r"]


def test_an_abort_during_a_load_leaves_the_blocks_to_the_engine_and_the_lease_to_the_copy(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 192)
    rig.step()
    assert rig.finish(request) is False
    rig.step()
    rig.drain_lookups()
    assert rig.session.leased == {"r"}, "the copy still reads the slots"
    rig.report(received=["r"])
    rig.drain_lookups()
    assert rig.session.leased == set()
    assert rig.scheduler._states == {}


def test_a_promised_load_is_handed_out_to_fail_when_it_can_t_be_planned(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.scheduler.go_offline()
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(6), 192)
    (load,) = rig.step().loads
    assert list(load.pieces()) == []
    assert load.blocks == tuple(blocks(6)), "all of them: none can be trusted"
    assert rig.finish(request) is False


def load(rig, request_id="r"):
    """A request of which 3 chunks are being loaded, and leased."""
    request = rig.arrive(make_request(200, request_id))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 192)
    rig.scheduler.end_step(64)
    return request


def test_offline_ends_all_leases(rig):
    rig.stored(3)
    load(rig)
    rig.scheduler.go_offline()
    rig.lookups._thread.join(60)
    assert rig.session.leased == set()


def test_without_workers_nothing_is_known_of_requests():
    scheduler = SchedulerSide(None, None)
    request = make_request(200)
    scheduler.add(request)
    assert scheduler.num_loadable(request, 0) == 0
    assert scheduler.finish(request, ([],)) is False


def test_a_silent_sidecar_costs_later_requests_nothing(rig):
    rig.session.is_down = True
    assert rig.match(rig.arrive(make_request(200, "a"))) == (0, False)
    rig.session.before_lookup = lambda: pytest.fail("no call so soon")
    assert rig.match(rig.arrive(make_request(200, "b"))) == (0, False)


def test_a_sidecar_that_is_back_is_asked_at_once(rig):
    rig.session.is_down = True
    rig.arrive(make_request(200, "a"))
    rig.session.is_down = False
    rig.session.epoch += 1
    rig.arrive(make_request(200, "b"))
    assert rig.session.num_hints == 1


def test_what_is_in_memory_is_offered_though_the_sidecar_is_silent(rig):
    rig.stored(3)
    rig.session.is_down = True
    assert rig.match(rig.arrive(make_request(200))) == (192, True)


def test_a_lease_that_can_t_be_ended_now_is_left_to_the_client(rig):
    rig.stored(3)
    load(rig, "a")
    load(rig, "b")
    rig.drain_lookups()
    rig.session.is_down = True
    rig.report(received=["a"])  # not answered: the session owes it
    rig.report(received=["b"])  # not even sent: no call so soon
    rig.drain_lookups()
    assert rig.session.owed == ["b"]


def test_streaming_sessions_are_left_alone(rig):
    request = make_request(200, resumable=True)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (0, False)


def test_offline_takes_back_the_blocks_of_stores_under_way(rig):
    """The engine frees them when the request ends, since nobody holds them: a later commit would be torn."""
    request = rig.arrive(make_request(200))
    rig.arrive(make_request(200, "without stores"))
    under_way = job_ids(rig.step(new=[("r", blocks(7), 0, 200)]))
    rig.scheduler.go_offline()
    assert rig.finish(request) is False
    assert rig.step(preempted=["another"]).reclaimed == under_way
    assert rig.step().reclaimed == set()


def test_vllm_0_29_shows_tables_only_of_requests_that_got_blocks(rig):
    request = rig.arrive(make_request(200))

    def step(computed, scheduled, shown):
        cached = SimpleNamespace(req_ids=["r"], new_block_ids=[None], num_computed_tokens=[computed])
        return rig.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": scheduled},
                total_num_scheduled_tokens=scheduled,
                scheduled_spec_decode_tokens={},
                kv_connector_block_state=SimpleNamespace(block_ids=shown, boundary_state_offloads={}),
            )
        )

    assert not step(0, 60, {"r": (blocks(2),)}).stores
    (job,) = step(60, 10, {}).stores
    assert job.groups[0].blocks == tuple(blocks(2))
    (job,) = step(70, 130, {"r": (blocks(7),)}).stores
    assert job.groups[0].blocks == tuple(blocks(7)[2:6])
    rig.finish(request)
    assert not rig.scheduler._tables
