"""Reports of scheduled requests to the sidecar: chunks that the engine had, loads, or computes."""

import pytest

from lmcache_client.rpc.kvcache_pb2 import Scheduled
from tests.harness.client.scheduler_rig import blocks, make_request

CHUNK = 64


def reported(rig) -> list:
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    return rig.session.scheduled


def figures(
    num_engine: int, num_hit: int, num_loaded: int, prompt: int = 200, computed: int = 0
) -> Scheduled:
    """Expected report: chunks in the engine, chunks of the hit, and tokens."""
    return Scheduled(
        num_engine_chunks=num_engine,
        num_hit_chunks=num_hit,
        num_loaded_tokens=num_loaded,
        num_prompt_tokens=prompt,
        num_engine_tokens=computed,
        first_blocks=b"p0",
        block_tokens=32,
        reports_times=True,
    )


@pytest.mark.parametrize(
    ("num_stored", "computed", "expected"),
    [
        (0, 0, figures(0, 0, 0)),
        (1, 0, figures(0, 1, 64)),
        (3, 0, figures(0, 3, 192)),
        (3, 64, figures(1, 3, 128, computed=64)),
        (3, 96, figures(1, 3, 96, computed=96)),  # half of a chunk
        (3, 192, figures(3, 3, 0, computed=192)),
        (0, 128, figures(2, 2, 0, computed=128)),
        (1, 128, figures(2, 2, 0, computed=128)),  # the engine has more chunks than the cache
        # The engine has all tokens that can be loaded of a prompt that ends with a chunk.
        (0, 160, figures(3, 3, 0, 192, computed=160)),
        (0, 192, figures(3, 3, 0, 192, computed=192)),
    ],
)
def test_scheduled_request_is_reported_with_all_chunks(rig, num_stored, computed, expected):
    rig.stored(num_stored)
    request = rig.arrive(make_request(expected.num_prompt_tokens))
    assert rig.match(request, computed) == rig.match(request, computed)
    assert not reported(rig), "a lookup alone is not reported"
    rig.begin(request, computed)
    assert reported(rig) == [("r", 3, expected)]
    rig.allocate(request, blocks(7), 0)  # vLLM calls this again when the load is done
    assert len(reported(rig)) == 1


def test_full_load_is_leased_and_reported_in_a_single_call(rig):
    rig.stored(3)
    request, calls = rig.arrive(make_request(200)), []
    rig.session.before_lookup = lambda: calls.append(None)
    rig.begin(request)
    assert len(reported(rig)) == len(calls) == 1
    assert rig.session.leased == {"r"}


def test_load_that_ends_within_an_idle_step_is_reported_without_lease(rig):
    request = rig.matched()
    released = []
    rig.session.release = lambda request_ids, **_: released.extend(request_ids)
    rig.begin(request)
    assert rig.step().is_idle
    rig.drain_lookups()
    assert not rig.session.scheduled
    rig.report(received=["r"])
    rig.drain_lookups()
    assert (rig.session.scheduled, rig.session.leased) == ([("r", 3, figures(0, 3, 192))], set())
    assert not released, "nothing was leased"
    rig.step()
    assert len(reported(rig)) == 1


def test_load_that_outlasts_an_idle_step_is_leased(rig):
    rig.begin(rig.matched())
    for leased in set(), {"r"}:
        assert rig.step().is_idle
        rig.drain_lookups()
        assert rig.session.leased == leased


def test_load_during_a_computing_step_is_leased(rig):
    """The duration of the step is unknown, and rows may be evicted during it."""
    rig.begin(rig.matched())
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    assert rig.session.leased == {"r"}


def test_reduced_load_is_reported_with_fewer_tokens(rig):
    request = rig.matched()
    rig.allocate(request, blocks(6), 96)
    (load,) = rig.step().loads
    assert load.blocks == (100, 101, 102)
    assert reported(rig) == [("r", 3, figures(0, 2, 96))]


def test_preempted_request_is_reported_again_and_failed_load_is_not(rig):
    request = rig.matched()
    rig.begin(request)
    rig.report(received=["r"])
    rig.step(preempted=["r"])
    rig.begin(request)
    assert [figures for _, _, figures in reported(rig)] == [figures(0, 3, 192)] * 2
    rig.report(failed=["r"], received=["r"])
    assert rig.begin(request) == 0
    assert len(reported(rig)) == 2


def test_requests_without_lookup_are_reported_without_keys(rig):
    """The sidecar counts their tokens, so that the causes add up to all prompts."""
    short = rig.arrive(make_request(CHUNK - 1, "short"))
    unread = rig.arrive(make_request(200, "unread", skip_reading_prefix_cache=True))
    rig.extra_keys["unknown"] = None
    unnamed = rig.arrive(make_request(200, "unnamed", lora_request="unknown"))
    for request in (short, unread, unnamed):
        rig.begin(request)
    counted = [(name, num_keys, sent.num_prompt_tokens) for name, num_keys, sent in reported(rig)]
    assert counted == [("short", 0, CHUNK - 1), ("unread", 0, 200), ("unnamed", 0, 200)]


def test_unreachable_sidecar_gets_no_report_and_delays_no_request(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    rig.session.is_down = True
    assert rig.begin(request) == 192
    assert not reported(rig)
