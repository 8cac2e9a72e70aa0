"""When the scheduler side asks, and what it waits for."""

import threading

import pytest

from lmcache.engines.core.jobs import WorkerReport
from lmcache.engines.core.lookups import MAX_ANSWER_SECONDS, MIN_ANSWER_SECONDS
from lmcache.engines.core.requests import Ticket
from lmcache.engines.core.scheduler import OLD_SECONDS
from lmcache.engines.core.waiting import FIRST_ROW_SECONDS, STALL_SECONDS
from tests.harness.scheduler_rig import GRID, Rig, blocks, hashes, make_request


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()


def test_what_is_in_memory_is_offered_without_a_call(rig):
    rig.stored(3)
    rig.session.before_lookup = lambda: pytest.fail("no call is needed")
    request = make_request(192 + 8)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (192, True), "in the very step that it arrived in"


def test_nothing_is_leased_for_a_request_that_only_waits(rig):
    rig.stored(3)
    request = rig.arrive(make_request(2000))
    assert rig.session.num_hints == 1
    assert rig.session.leased == set()
    assert rig.match(request) == (192, True)
    rig.drain_lookups()
    assert rig.session.leased == set(), "not allocated yet"
    rig.allocate(request, blocks(6), 192)
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    assert rig.session.leased == {"r"}


def test_rows_stored_while_a_request_queued_are_offered(rig):
    request = rig.arrive(make_request(200))
    rig.now = 60.0
    rig.stored(3)
    assert rig.match(request) == (192, True)


def test_until_answered_the_engine_asks_again_and_then_takes_what_is_in_memory(rig):
    rig.stored(2)
    gate = threading.Event()
    rig.session.before_lookup = gate.wait
    request = make_request(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (None, False)
    rig.now = MIN_ANSWER_SECONDS - 0.001
    assert rig.match(request) == (None, False)
    rig.now = MIN_ANSWER_SECONDS
    assert rig.match(request) == (128, True)
    gate.set()
    rig.drain_lookups()
    rig.allocate(request, blocks(7), 0)
    rig.drain_lookups()
    assert rig.session.leased == set()


def test_a_request_whose_extra_keys_can_t_be_found_is_computed_while_others_are_answered(rig):
    """Something in it raises, whatever it is. The sidecar is not silent: it was never asked."""
    request = rig.arrive(make_request(200, "odd", lora_request="raises"))
    rig.now = 0.5
    rig.arrive(make_request(200, "another"))
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(7), 0)
    assert rig.step(new=[("odd", blocks(7), 0, 200)]).stores == []


def test_with_memory_alone_no_answer_is_waited_for(rig):
    gate = threading.Event()
    rig.session.memory_only, rig.session.before_lookup = True, gate.wait
    rig.stored(1)
    request = make_request(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (64, True)
    gate.set()


def test_the_bound_of_an_answer_follows_how_long_answers_take(rig):
    def slow():
        rig.now += 0.05

    rig.session.before_lookup = slow
    for number in range(3):
        rig.arrive(make_request(200, str(number)))
    assert rig.lookups.answer_seconds == pytest.approx(0.1)
    rig.session.before_lookup = lambda: setattr(rig, "now", rig.now + 5)
    for number in range(3):
        rig.arrive(make_request(200, str(number)))
    assert rig.lookups.answer_seconds == MAX_ANSWER_SECONDS


def test_while_the_sidecar_answers_others_a_request_waits_for_its_turn(rig):
    """Many arrive at once on a busy machine: the last one must not be computed for being the last."""
    turns, served = [threading.Event() for _ in range(4)], threading.Semaphore(0)
    waiting = iter(turns)

    def answer():
        served.release()
        assert next(waiting).wait(60)

    rig.session.before_lookup = answer
    requests = [make_request(200, str(number), cache_salt=str(number)) for number in range(4)]
    for request in requests:
        rig.scheduler.on_new_request(request)
    assert served.acquire(timeout=60)
    for number in range(3):
        rig.now += 0.9 * MIN_ANSWER_SECONDS
        assert rig.match(requests[3]) == (None, False)
        turns[number].set()
        assert served.acquire(timeout=60), "the next one is asked for, the one before was answered"
    rig.now += MAX_ANSWER_SECONDS
    assert rig.match(requests[3]) == (0, False), "now it is silent"
    turns[3].set()


def test_an_answer_is_waited_for_as_long_as_computing_takes(rig):
    """Within its bounds: of 3 chunks in 120 ms, and of 3 in 3 s."""
    gate = threading.Event()
    rig.session.before_lookup = gate.wait
    for chunk_seconds, bound in ((0.04, 0.12), (1.0, MAX_ANSWER_SECONDS)):
        rig.scheduler._rate.tokens_per_second = 64 / chunk_seconds
        request = make_request(200, f"{chunk_seconds}")
        rig.scheduler.on_new_request(request)
        began = rig.now
        rig.now = began + bound - 0.001
        assert rig.match(request) == (None, False)
        rig.now = began + bound + 0.001
        assert rig.match(request) == (0, False)
    gate.set()


def test_an_old_answer_is_asked_for_again(rig):
    request = rig.arrive(make_request(200))
    rig.now = OLD_SECONDS
    rig.session.num_pending = 3
    assert rig.match(request) == (None, False)
    rig.drain_lookups()
    assert rig.match(request) == (None, False), "by now lower tiers have some"
    rig.stored(3)
    assert rig.match(request) == (192, True)


# ---- waiting for rows on their way ----


def test_rows_on_their_way_up_are_waited_for_while_they_come(rig):
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    for num_chunks in (0, 1, 2):
        assert rig.match(request) == (None, False)
        rig.drain_lookups()
        rig.stored(num_chunks + 1)
        rig.session.num_pending = 2 - num_chunks
        rig.now += 0.15
    assert rig.match(request) == (192, True), "after 0.45 s, with no rate known"


def test_a_stall_ends_the_wait(rig):
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    rig.now = 0.01
    assert rig.match(request) == (None, False)
    rig.now += STALL_SECONDS
    assert rig.match(request) == (64, True)


def test_rows_that_never_come_are_given_up(rig):
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.now = FIRST_ROW_SECONDS
    assert rig.match(request) == (0, False)


def test_rows_that_come_slower_than_they_are_computed_are_not_waited_for(rig):
    rig.session.num_pending = 3
    rig.scheduler._rate.tokens_per_second = 64 / 0.01  # a chunk in 10 ms
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    rig.now = 0.04
    assert rig.match(request) == (64, True)


def test_a_stall_is_waited_out_while_computing_would_take_longer(rig):
    """On a machine that is busy with others who computes has to wait as well."""
    rig.session.num_pending = 3
    rig.scheduler._rate.tokens_per_second = 64 / 0.06
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    rig.now = 0.01
    assert rig.match(request) == (None, False)
    rig.now += 2 * 0.06 - 0.001
    assert rig.match(request) == (None, False)
    rig.now += 0.002
    assert rig.match(request) == (64, True)


def test_rows_slow_to_begin_may_be_fast_to_come(rig):
    """What passes before the first one is not their pace: computing the rest would take longer than that."""
    rig.session.num_pending = 3
    rig.scheduler._rate.tokens_per_second = 64 / 0.06
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    rig.now = 0.1
    assert rig.match(request) == (None, False)
    rig.stored(3)
    rig.now = 0.11
    assert rig.match(request) == (192, True)


def test_silence_is_borne_for_as_long_as_the_user_says():
    """Before the first row and between rows, as before an answer; computing is as slow as the user says."""
    rig = Rig(answer_seconds=5.0, prefill_tokens_per_second=1.0)
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    for num_chunks in range(3):
        assert rig.match(request) == (None, False)
        rig.drain_lookups()
        rig.now += 4.999
        assert rig.match(request) == (None, False), "no row for a long time"
        rig.stored(num_chunks + 1)
    assert rig.match(request) == (192, True)
    rig.scheduler.go_offline()


def test_a_rate_that_the_user_says_is_not_measured():
    rig = Rig(prefill_tokens_per_second=1234.5)
    assert rig.step([("r", blocks(8), 0, 512)]).timed_step == 0
    rig.scheduler.take_report(WorkerReport(timed_step=1))
    rig.drain_lookups()
    assert rig.scheduler._rate.tokens_per_second == 1234.5
    rig.scheduler.go_offline()


def test_one_long_step_of_the_engine_is_no_silence_of_rows(rig):
    """Nobody looked meanwhile, and it took the processor from who brings them. A second one is."""
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    other = [("other", blocks(2), 0, 64)]
    rig.step(new=other)
    rig.now = 2 * FIRST_ROW_SECONDS
    assert rig.match(request) == (None, False)
    rig.step(new=other)
    rig.now += 2 * FIRST_ROW_SECONDS
    assert rig.match(request) == (0, False)


def test_only_what_is_on_its_way_is_waited_for(rig):
    """A tail that nobody has must not cost the head its load, nor the request time."""
    rig.session.num_pending = 1
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.stored(1)
    assert rig.match(request) == (64, True)


def test_who_waits_behind_another_s_rows_goes_on_waiting_while_those_come(rig):
    rig.session.num_pending = 3
    first = rig.arrive(make_request(200, "first"))
    second = rig.arrive(make_request(200, "second", cache_salt="other"))
    assert rig.match(first) == rig.match(second) == (None, False)
    for num_chunks in (1, 2):
        rig.now += 0.15
        rig.stored(num_chunks)
        assert rig.match(first) == rig.match(second) == (None, False)


def test_everybody_who_waits_is_asked_about_again(rig):
    """Not only who is first in the queue: else the others wait as long as rows come for anybody."""
    look_up = rig.session.lookup
    rig.session.num_pending = 3
    first = rig.arrive(make_request(4000, "first"))
    second = rig.arrive(make_request(200, "second", cache_salt="other"))

    def nothing_for_the_second(request_id, *args, **fields):
        found = look_up(request_id, *args, **fields)
        return found if request_id == "first" else found._replace(num_pending=0)

    rig.session.lookup = nothing_for_the_second
    for num_chunks in range(1, 5):
        assert rig.match(first) == (None, False)
        if rig.match(second) == (0, False):
            return
        rig.step()
        rig.drain_lookups()
        rig.now += 0.015
        rig.stored(num_chunks)
    raise AssertionError("nothing comes for the second, and still it waits")


def test_keys_that_the_scheduler_named_meanwhile_are_not_taken_away(rig):
    """ExtraKeys become known on one thread while the other one looks: at worst between these two stores."""
    rig.stored(3, lora_fingerprint=b"fp")
    lookups, seen = rig.lookups, []

    class Watched(Ticket):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "extra_keys" and value is not None:
                seen.append(lookups.find(self))
            elif name == "keys" and seen:
                seen.append(value)

    ticket = Watched(
        "r", GRID.chunk_hashes(hashes(192), 0, 3), b"n" * 32, find_extra_keys=lambda: ((0, b"fp"),)
    )
    lookups.ask(ticket)
    rig.drain_lookups()
    assert len(seen) > 1
    assert all(value is not None for value in seen)


# ---- waiting for rows that another request is computing ----


def test_a_prefix_that_another_request_is_computing_is_computed_once(rig):
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(200, "second")
    rig.scheduler.on_new_request(first)
    rig.scheduler.on_new_request(second)
    assert rig.match(first) == (0, False)
    rig.allocate(first, blocks(7), 0)
    rig.now = 100.0  # however long its steps take
    assert rig.match(second) == (None, False)
    (job,) = rig.step(new=[("first", blocks(7), 0, 200)]).stores
    assert rig.match(second) == (None, False), "computed, but not in memory yet"
    rig.stored(3)
    rig.report(ended=[job.job_id])
    assert rig.match(second) == (192, True)


def test_what_the_engine_itself_has_of_another_request_is_not_waited_for(rig):
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(256 + 8, "second")
    rig.scheduler.on_new_request(first)
    rig.scheduler.on_new_request(second)
    assert rig.match(first) == (0, False)
    rig.allocate(first, blocks(7), 0)
    assert rig.match(second, computed=64) == (None, False), "the second chunk is still being computed"
    assert rig.match(second, computed=192) == (0, False), "in the engine's prefix cache, and not stored yet"


@pytest.mark.parametrize("end", ["preempted", "finished", "not stored", "reset"])
def test_who_does_not_compute_any_more_is_not_waited_for(rig, end):
    rig.session.memory_only = True
    first, second = make_request(200, "first"), make_request(200, "second")
    rig.scheduler.on_new_request(first)
    rig.scheduler.on_new_request(second)
    assert rig.match(first) == (0, False)
    rig.allocate(first, blocks(7), 0)
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
    assert rig.match(second) == (0, False)
    assert rig.scheduler._computing._states == {}


def test_nobody_waits_for_itself_after_a_preemption(rig):
    rig.session.memory_only = True
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(7), 0)
    assert rig.match(request) == (0, False)


# ---- resets ----
