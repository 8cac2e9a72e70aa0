"""Waits of the scheduler side for rows that are being promoted, or that another request computes."""

import threading

import pytest

from lmcache_client.core.jobs import WorkerReport
from lmcache_client.vllm.hand_over import announce
from lmcache_store.common.timing import TIMING
from tests.harness.client.scheduler_rig import Rig, blocks, make_request
from tests.harness.sidecar.wire import NAMESPACE


def arrive_together(rig, num_tokens=200):
    """Return two requests of one prompt without rows below memory. The first one begins to compute."""
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(num_tokens, "second")
    rig.scheduler.on_new_request(first)
    rig.scheduler.on_new_request(second)
    assert rig.begin(first) == 0
    return first, second


def test_promoted_rows_are_waited_for_while_they_arrive(rig):
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    for num_chunks in (0, 1, 2):
        assert rig.match(request) == (None, False)
        rig.drain_lookups()
        rig.stored(num_chunks + 1)
        rig.session.num_pending = 2 - num_chunks
        rig.now += 0.15
    assert rig.match(request) == (192, True), "the wait may take 0.45 s without a known rate"


WAITS = {
    "promotion stalls": (0, [(0.01, 1, None), (0.01 + TIMING.row_seconds, 1, 64)]),
    "no row arrives": (0, [(TIMING.first_row_seconds, 0, 0)]),
    "rows arrive slower than computing": (0.01, [(0.04, 1, 64)]),
    # On a busy machine computing is delayed as well.
    "a stall that computing would outlast": (0.06, [(0.01, 1, None), (0.129, 1, None), (0.131, 1, 64)]),
    "time before the first row is no rate": (0.06, [(0.1, 1, None), (0.11, 3, 192)]),
}
"""Seconds to compute a chunk, 0 if unknown, and steps: time, stored chunks, and the offered tokens.

None: the request waits."""


@pytest.mark.parametrize(("chunk_seconds", "steps"), WAITS.values(), ids=WAITS)
def test_wait_for_promoted_rows_ends_when_computing_is_faster(rig, chunk_seconds, steps):
    rig.scheduler._rate.tokens_per_second = 64 / chunk_seconds if chunk_seconds else 0.0
    request = rig.waiting()
    for now, num_stored, num_offered in steps:
        rig.now = now
        rig.stored(num_stored)
        assert rig.match(request) == (num_offered, bool(num_offered))


def test_configured_answer_seconds_extend_all_waits():
    """The setting applies before the answer, before the first row, and between rows.

    Computing is configured as slow.
    """
    rig = Rig(answer_seconds=5.0, prefill_tokens_per_second=1.0)
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    for num_chunks in range(3):
        assert rig.match(request) == (None, False)
        rig.drain_lookups()
        rig.now += 4.999
        assert rig.match(request) == (None, False), "no row has arrived for a long time"
        rig.stored(num_chunks + 1)
    assert rig.match(request) == (192, True)
    rig.scheduler.go_offline()


def test_configured_prefill_rate_is_not_measured():
    rig = Rig(prefill_tokens_per_second=1234.5)
    assert rig.step([("r", blocks(8), 0, 512)]).timed_step == 0
    rig.scheduler.take_report(WorkerReport(timed_step=1))
    rig.drain_lookups()
    assert rig.scheduler._rate.tokens_per_second == 1234.5
    rig.scheduler.go_offline()


def test_single_long_step_does_not_end_the_wait(rig):
    """During the step the scheduler did not look, and promotion had no processor time.

    A second long step is silence.
    """
    request = rig.waiting()
    other_request = [("other", blocks(2), 0, 64)]
    rig.step(new=other_request)
    rig.now = 2 * TIMING.first_row_seconds
    assert rig.match(request) == (None, False)
    rig.step(new=other_request)
    rig.now += 2 * TIMING.first_row_seconds
    assert rig.match(request) == (0, False)


@pytest.mark.parametrize("activity", ["rows of others", "answers to others", "long steps", "announced rows"])
def test_each_wait_ends_although_computing_is_slow(activity):
    """The user has set one token per second. No row arrives for the request, as after the loss of a peer."""
    rig = Rig(prefill_tokens_per_second=1.0)

    def hold() -> None:
        assert gate.wait(60)

    num_announced = 192 if activity == "announced rows" else 0
    request = make_request(200, kv_transfer_params=announce(NAMESPACE, num_announced))
    rig.session.num_pending, gate = 3, threading.Event()
    is_unanswered = activity == "answers to others"
    if is_unanswered:
        rig.session.before_lookup = hold
        rig.scheduler.on_new_request(request)
    else:
        rig.arrive(request)
    num_steps, step_seconds = 0, 2.0 if activity == "long steps" else 0.1
    rig.now += step_seconds  # in the queue
    while rig.match(request) == (None, False):
        num_steps += 1
        if not is_unanswered:
            rig.drain_lookups()
        rig.now += step_seconds
        if activity == "rows of others":
            rig.scheduler._waits._arrivals.note(1, rig.now - 0.1, rig.now)
        elif is_unanswered:
            rig.lookups._answered_at = rig.now
        elif activity == "long steps":
            rig.step(new=[("another", blocks(2), 0, 64)])
        assert rig.now <= 2 * TIMING.promotion_seconds
    assert num_steps > 1
    gate.set()
    rig.scheduler.go_offline()


def test_only_pending_rows_are_waited_for(rig):
    """A missing tail must neither prevent the load of the head, nor delay the request."""
    rig.session.num_pending = 1
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    assert rig.match(request) == (64, True)


def test_queued_request_waits_while_rows_of_others_arrive(rig):
    rig.session.num_pending = 3
    first = rig.arrive(make_request(200, "first"))
    second = rig.arrive(make_request(200, "second", cache_salt="other"))
    assert rig.match(first) == rig.match(second) == (None, False)
    for num_chunks in (1, 2):
        rig.now += 0.15
        rig.stored(num_chunks)
        assert rig.match(first) == rig.match(second) == (None, False)


def test_all_waiting_requests_are_refreshed(rig):
    """The first request in the queue is not enough. Otherwise the others would wait while any rows arrive."""
    original_lookup = rig.session.lookup
    rig.session.num_pending = 3
    first = rig.arrive(make_request(4000, "first"))
    second = rig.arrive(make_request(200, "second", cache_salt="other"))

    def lookup_without_second(request_id, *args, **fields):
        result = original_lookup(request_id, *args, **fields)
        return result if request_id == "first" else result._replace(num_pending=0)

    rig.session.lookup = lookup_without_second
    for num_chunks in range(1, 5):
        assert rig.match(first) == (None, False)
        if rig.match(second) == (0, False):
            return
        rig.step()
        rig.drain_lookups()
        rig.now += 0.015
        rig.stored(num_chunks)
    raise AssertionError("the second request waits although no rows arrive for it")


def test_shared_prefix_is_computed_once(rig):
    _, second = arrive_together(rig)
    rig.step(new=[("first", blocks(7), 0, 63)])
    rig.now = 100.0  # the step takes long
    assert rig.match(second) == (None, False)
    (job,) = rig.step(cached=[("first", None, 63, 137, False)]).stores
    assert rig.match(second) == (None, False), "the chunk is computed, but not in memory yet"
    rig.stored(3)
    rig.report(ended=[job.job_id])
    assert rig.match(second) == (192, True)


@pytest.mark.parametrize(("low", "high"), [(1, 0), (0, -1)])
def test_request_waits_for_none_of_lower_priority(rig, low, high):
    first, second = make_request(200, "first", priority=low), make_request(200, "second", priority=high)
    third = make_request(200, "third", priority=low)
    rig.session.memory_only = True
    for request in (first, second, third):
        rig.scheduler.on_new_request(request)
    assert rig.begin(first) == 0
    assert rig.match(third) == (None, False)
    assert rig.begin(second) == 0
    assert rig.match(third) == (None, False), "it may wait for both"


def test_request_that_gets_no_steps_is_not_waited_for(rig):
    """A request that was loaded in part may wait for blocks. vLLM may never schedule it."""
    _, second = arrive_together(rig)
    for _ in range(3):
        rig.step(new=[("first", blocks(7), 0, 1)])
        rig.now += 2 * TIMING.hold_seconds
        assert rig.match(second) == (None, False), "the step of the first request takes longer than the limit"
    rig.step(new=[("first", blocks(7), 0, 1)])
    for seconds, answer in ((TIMING.hold_seconds - 0.01, (None, False)), (0.02, (0, False))):
        rig.now += seconds
        rig.step()
        assert rig.match(second) == answer


def test_rows_in_the_engines_prefix_cache_are_not_waited_for(rig):
    _, second = arrive_together(rig, 256 + 8)
    assert rig.match(second, computed=64) == (None, False), "the second chunk is still being computed"
    assert rig.match(second, computed=192) == (0, False), "the chunks are in the engine's prefix cache"


@pytest.mark.parametrize("end", ["preempted", "finished", "not stored", "reset"])
def test_request_that_stopped_computing_is_not_waited_for(rig, end):
    first, second = arrive_together(rig)
    assert rig.match(second) == (None, False)
    if end == "preempted":
        rig.step(preempted=["first"])
    elif end == "finished":
        rig.finish(first)
    elif end == "reset":
        rig.scheduler.reset_cache()
    else:
        (job,) = rig.step(new=[("first", blocks(7), 0, 200)]).stores
        rig.report(ended=[job.job_id])
    assert (rig.match(second), rig.scheduler._computing._states) == ((0, False), {})


def test_request_does_not_wait_for_itself_after_a_preemption(rig):
    rig.session.memory_only = True
    request = rig.computing()
    assert rig.match(request) == (0, False)
