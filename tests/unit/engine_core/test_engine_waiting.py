"""Calls of the scheduler side to the sidecar, and its waits for answers."""

import threading

import pytest

from lmcache_client.core.lookups import MAX_ANSWER_SECONDS, MIN_ANSWER_SECONDS
from lmcache_client.core.requests import Ticket
from lmcache_client.core.wait_decisions import IDLE_WAIT_SECONDS, OLD_SECONDS
from tests.harness.client.scheduler_rig import GRID, Rig, blocks, hashes, make_request


def test_rows_in_memory_are_offered_without_a_call(rig):
    rig.stored(3)
    rig.session.before_lookup = lambda: pytest.fail("no call is needed")
    request = make_request(192 + 8)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (192, True), "the hit must be offered in the step of the arrival"


def test_waiting_request_has_no_lease(rig):
    rig.stored(3)
    request = rig.arrive(make_request(2000))
    assert (rig.session.num_hints, rig.session.leased) == (1, set())
    assert rig.match(request) == (192, True)
    rig.drain_lookups()
    assert rig.session.leased == set(), "the request has no blocks yet"
    rig.allocate(request, blocks(6), 192)
    rig.scheduler.end_step(64)
    rig.drain_lookups()
    assert rig.session.leased == {"r"}


def test_unanswered_lookup_offers_rows_in_memory_after_a_timeout(rig):
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


def test_request_whose_extra_keys_raise_is_computed(rig):
    """Finding the keys raises an error. The sidecar does not count as silent, because it got no call."""
    request = rig.arrive(make_request(200, "odd", lora_request="raises"))
    rig.now = 0.5
    rig.arrive(make_request(200, "another"))
    assert rig.begin(request) == 0
    assert rig.step(new=[("odd", blocks(7), 0, 200)]).stores == []


def test_memory_only_cache_does_not_wait_for_answers(rig):
    gate = threading.Event()
    rig.session.memory_only, rig.session.before_lookup = True, gate.wait
    rig.stored(1)
    request = make_request(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (64, True)
    gate.set()


def test_answer_timeout_follows_the_answer_times(rig):
    def slow_lookup():
        rig.now += 0.05

    rig.session.before_lookup = slow_lookup
    for number in range(3):
        rig.arrive(make_request(200, str(number)))
    assert rig.lookups.answer_seconds == pytest.approx(0.1)
    rig.session.before_lookup = lambda: setattr(rig, "now", rig.now + 5)
    for number in range(3):
        rig.arrive(make_request(200, str(number)))
    assert rig.lookups.answer_seconds == MAX_ANSWER_SECONDS


def test_request_waits_while_the_sidecar_answers_others(rig):
    """Many requests arrive at once on a busy machine.

    The last request must not be computed only for being last.
    """
    turns, started_lookups = [threading.Event() for _ in range(4)], threading.Semaphore(0)
    remaining_turns = iter(turns)

    def answer():
        started_lookups.release()
        assert next(remaining_turns).wait(60)

    rig.session.before_lookup = answer
    requests = [make_request(200, str(number), cache_salt=str(number)) for number in range(4)]
    for request in requests:
        rig.scheduler.on_new_request(request)
    assert started_lookups.acquire(timeout=60)
    for number in range(3):
        rig.now += 0.9 * MIN_ANSWER_SECONDS
        assert rig.match(requests[3]) == (None, False)
        turns[number].set()
        assert started_lookups.acquire(timeout=60), "the next lookup must start after the previous answer"
    rig.now += MAX_ANSWER_SECONDS
    assert rig.match(requests[3]) == (0, False), "the sidecar is silent now"
    turns[3].set()


def test_wait_for_an_answer_is_limited_by_the_computing_time(rig):
    """The wait is bounded by the computing time: 3 chunks in 120 ms, and 3 chunks in 3 s."""
    gate = threading.Event()
    rig.session.before_lookup = gate.wait
    for chunk_seconds, bound in ((0.04, 0.12), (1.0, MAX_ANSWER_SECONDS)):
        rig.scheduler._rate.tokens_per_second = 64 / chunk_seconds
        request = make_request(200, f"{chunk_seconds}")
        rig.scheduler.on_new_request(request)
        start = rig.now
        rig.now = start + bound - 0.001
        assert rig.match(request) == (None, False)
        rig.now = start + bound + 0.001
        assert rig.match(request) == (0, False)
    gate.set()


def test_old_answer_is_refreshed(rig):
    request = rig.arrive(make_request(200))
    rig.now = OLD_SECONDS
    rig.session.num_pending = 3
    assert rig.match(request) == (None, False)
    rig.drain_lookups()
    assert rig.match(request) == (None, False), "lower tiers have rows now"
    rig.stored(3)
    assert rig.match(request) == (192, True)


def test_concurrent_key_updates_are_not_lost(rig):
    """A thread sets the extra keys while another thread reads: at worst between these two assignments."""
    rig.stored(3, lora_fingerprint=b"fp")
    lookups, observed_values = rig.lookups, []

    class ObservedTicket(Ticket):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "extra_keys" and value is not None:
                observed_values.append(lookups.find(self))
            elif name == "keys" and observed_values:
                observed_values.append(value)

    ticket = ObservedTicket(
        "r", GRID.chunk_hashes(hashes(192), 0, 3), b"n" * 32, find_extra_keys=lambda: ((0, b"fp"),)
    )
    lookups.ask(ticket)
    rig.drain_lookups()
    assert len(observed_values) > 1
    assert all(value is not None for value in observed_values)


@pytest.mark.parametrize("can_wait", [True, False])
def test_no_answer_stops_engines_that_step_together(can_wait, monkeypatch):
    rig, waits = Rig(can_wait=can_wait), []
    rig.waiting()
    monkeypatch.setattr(rig.lookups.answered, "wait", waits.append)
    rig.scheduler.end_step(0)
    assert waits == [IDLE_WAIT_SECONDS] * can_wait
    rig.scheduler.go_offline()
