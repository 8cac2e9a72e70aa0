"""What the sidecar is told of each request, once: which of its chunks the engine had, loads, or computes."""

from __future__ import annotations

import pytest

from lmcache.rpc.client import Scheduled
from tests.harness.scheduler_rig import Rig, blocks, make_request

CHUNK = 64


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()


def told(rig) -> list:
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    return rig.session.scheduled


def schedule(rig, request, computed=0):
    """As vLLM does: ask, then allocate what was offered."""
    num_tokens, _ = rig.match(request, computed)
    rig.allocate(request, blocks(-(-request.num_tokens // 32)), num_tokens)
    return num_tokens


@pytest.mark.parametrize(
    ("num_stored", "computed", "expected"),
    [
        (0, 0, Scheduled(0, 0, 0)),
        (1, 0, Scheduled(0, 1, 64)),
        (3, 0, Scheduled(0, 3, 192)),
        (3, 64, Scheduled(1, 3, 128)),
        (3, 96, Scheduled(1, 3, 96)),  # half of a chunk
        (3, 192, Scheduled(3, 3, 0)),
        (0, 128, Scheduled(2, 2, 0)),
        (1, 128, Scheduled(2, 2, 0)),  # the engine has more
    ],
)
def test_a_request_is_told_with_all_its_chunks(rig, num_stored, computed, expected):
    rig.stored(num_stored)
    request = rig.arrive(make_request(200))
    assert rig.match(request, computed) == rig.match(request, computed)
    assert not told(rig), "asking is no access"
    schedule(rig, request, computed)
    assert told(rig) == [("r", 3, expected)]
    rig.allocate(request, blocks(7), 0)  # vLLM says it again when the load is done
    assert len(told(rig)) == 1


@pytest.mark.parametrize("computed", [160, 192])
def test_the_chunk_that_a_prompt_ends_with_is_there_but_for_what_must_be_computed(rig, computed):
    request = rig.arrive(make_request(192))
    schedule(rig, request, computed)
    assert told(rig) == [("r", 3, Scheduled(3, 3, 0))]


def test_one_call_leases_and_tells_where_all_is_loaded(rig):
    rig.stored(3)
    request, calls = rig.arrive(make_request(200)), []
    rig.session.before_lookup = lambda: calls.append(None)
    schedule(rig, request)
    assert len(told(rig)) == len(calls) == 1
    assert rig.session.leased == {"r"}


def test_a_load_that_ends_within_an_idle_step_is_counted_and_never_leased(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    rig.session.release = lambda *_, **__: pytest.fail("nothing was leased")
    schedule(rig, request)
    assert rig.step().is_idle
    rig.drain_lookups()
    assert not rig.session.scheduled
    rig.report(received=["r"])
    rig.drain_lookups()
    assert rig.session.scheduled == [("r", 3, Scheduled(0, 3, 192))]
    assert rig.session.leased == set()
    rig.step()
    assert len(told(rig)) == 1


def test_a_load_that_outlasts_an_idle_step_is_leased(rig):
    rig.stored(3)
    schedule(rig, rig.arrive(make_request(200)))
    for leased in set(), {"r"}:
        assert rig.step().is_idle
        rig.drain_lookups()
        assert rig.session.leased == leased


def test_a_load_beside_a_step_that_computes_is_leased_with_it(rig):
    """Nobody knows how long the step takes, and rows may be evicted meanwhile."""
    rig.stored(3)
    schedule(rig, rig.arrive(make_request(200)))
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    assert rig.session.leased == {"r"}


def test_what_the_engine_loads_less_is_computed(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (192, True)
    rig.allocate(request, blocks(6), 96)
    assert told(rig) == [("r", 3, Scheduled(0, 2, 96))]


def test_a_preempted_request_is_told_again_and_one_whose_load_failed_is_not(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    schedule(rig, request)
    rig.report(received=["r"])
    rig.step(preempted=["r"])
    schedule(rig, request)
    assert [one for _, _, one in told(rig)] == [Scheduled(0, 3, 192)] * 2
    rig.report(failed=["r"], received=["r"])
    assert schedule(rig, request) == 0
    assert len(told(rig)) == 2


def test_requests_that_look_nothing_up_are_not_told(rig):
    short = rig.arrive(make_request(CHUNK - 1, "short"))
    unread = rig.arrive(make_request(200, "unread", skip_reading_prefix_cache=True))
    rig.extra_keys["unknown"] = None
    unnamed = rig.arrive(make_request(200, "unnamed", lora_request="unknown"))
    for request in (short, unread, unnamed):
        schedule(rig, request)
    assert not told(rig)


def test_a_sidecar_that_is_away_is_told_nothing_and_nobody_waits(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    rig.session.is_down = True
    assert schedule(rig, request) == 192
    assert not told(rig)
