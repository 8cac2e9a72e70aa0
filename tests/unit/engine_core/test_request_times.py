"""Times of requests, as the scheduler side measures them and reports them to the sidecar."""

import itertools
import math
import threading

from lmcache_client.core.jobs import WorkerReport
from lmcache_client.rpc.times import RequestTimes
from tests.harness.client.scheduler_rig import Rig, blocks, make_request


def sent(rig) -> list[RequestTimes]:
    """The times that the sidecar has received."""
    rig.lookups._queue.put(rig.lookups._send_times)
    rig.drain_lookups()
    return rig.session.times


def compute(rig, request, start: int, seconds: float = 0.5) -> int:
    """Schedule a step that computes the request's tokens from ``start`` on. Returns its number."""
    num_tokens = request.num_tokens - start
    meta = rig.step(new=[(request.request_id, blocks(7), start, num_tokens)])
    rig.now += seconds
    return meta.timed_step


def end_step(rig, step: int) -> None:
    rig.scheduler.take_report(WorkerReport(timed_step=step))


def approximately(times: RequestTimes) -> RequestTimes:
    return RequestTimes(*(round(value, 6) if isinstance(value, float) else value for value in times))


def test_the_lookup_ends_with_the_sidecars_answer(rig):
    rig.session.before_lookup = lambda: setattr(rig, "now", rig.now + 0.125)
    request = rig.arrive(make_request(200))
    rig.session.before_lookup = lambda: None
    rig.now = 0.75
    assert rig.begin(request) == 0
    end_step(rig, compute(rig, request, 0))
    assert sent(rig) == [RequestTimes("r", lookup_seconds=0.125, first_token_seconds=1.25)]


def test_a_lookup_without_answer_ends_when_the_request_is_scheduled(rig):
    gate = threading.Event()
    rig.session.before_lookup = gate.wait
    request = make_request(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (None, False)
    rig.now = 0.5
    assert rig.match(request) == (0, False)
    gate.set()
    rig.allocate(request, blocks(7), 0)
    end_step(rig, compute(rig, request, 0))
    assert sent(rig) == [RequestTimes("r", lookup_seconds=0.5, first_token_seconds=1.0)]


def test_waits_for_rows_add_up_and_exclude_the_engines_queue(rig):
    rig.session.num_pending, rig.now = 3, 8.0
    request = rig.arrive(make_request(200))
    for now in (8.0, 8.0625, 8.125):
        rig.now = now
        assert rig.match(request) == (None, False)
    rig.stored(3)
    assert rig.match(request) == (192, True)
    rig.now = 13.0  # the engine has no blocks
    assert rig.begin(request) == 192
    rig.step()
    rig.report(received=["r"])
    end_step(rig, compute(rig, request, 192))
    (times,) = map(approximately, sent(rig))
    assert times == RequestTimes("r", wait_seconds=0.125, first_token_seconds=5.5)


def test_a_request_that_is_held_back_for_memory_waits(rig):
    rig.stored(3)
    first, second = rig.arrive(make_request(200, "first")), rig.arrive(make_request(200, "second"))
    rig.scheduler._open_loads.num_blocks = 8  # one of the loads fits
    assert rig.begin(first) == 192
    rig.scheduler._computing.clear()
    assert rig.match(second) == (None, False)
    rig.step()
    rig.now = 2.0
    rig.report(received=["first"])
    end_step(rig, compute(rig, first, 192, seconds=0.0))
    assert rig.begin(second) == 192
    rig.step()
    rig.report(received=["second"])
    end_step(rig, compute(rig, second, 192, seconds=0.0))
    assert sent(rig) == [
        RequestTimes("first", load_seconds=2.0, first_token_seconds=2.0),
        RequestTimes("second", wait_seconds=2.0, first_token_seconds=2.0),
    ]


def test_a_failed_load_of_a_request_that_is_aborted_counts_as_failed(rig):
    request = rig.loading()
    rig.report(failed=["r"], received=["r"])
    rig.finish(request)
    assert sent(rig) == [RequestTimes("r", num_failed_tokens=192)]


def test_a_request_that_is_aborted_during_its_load_is_reported_after_its_schedule(rig):
    request = rig.loading()
    rig.finish(request)
    assert not sent(rig), "the sidecar does not know the load yet"
    rig.now = 0.25
    rig.report(received=["r"])
    assert sent(rig) == [RequestTimes("r", load_seconds=0.25)]
    assert [name for name, *_ in rig.session.scheduled] == ["r"]


def test_a_request_that_was_never_scheduled_is_not_reported(rig):
    request = rig.arrive(make_request(200))
    rig.match(request)
    rig.finish(request)
    assert not sent(rig)


def test_a_preempted_request_is_reported_for_each_start(rig):
    request = rig.arrive(make_request(200))
    for _ in range(2):
        rig.begin(request)
        rig.now += 1.0
        rig.step(preempted=["r"])
    rig.begin(request)
    end_step(rig, compute(rig, request, 0))
    rig.step(preempted=["r"])
    rig.begin(request)
    end_step(rig, compute(rig, request, 0))
    first_tokens = [times.first_token_seconds for times in sent(rig)]
    assert first_tokens == [0.0, 0.0, 2.5, 0.0], "only one start computes the first token"
    assert len(rig.session.scheduled) == 4


def test_times_precede_the_report_of_the_next_start(rig, monkeypatch):
    """The sidecar would take later ones for those of the next start, which may load what was computed."""
    messages: list[str] = []

    def logged(name: str, method):
        def call(*args, **fields):
            if fields.get("scheduled") or fields.get("times"):
                messages.append(name)
            return method(*args, **fields)

        return call

    monkeypatch.setattr(rig.session, "lookup", logged("report", rig.session.lookup))
    monkeypatch.setattr(rig.session, "release", logged("times", rig.session.release))
    rig.lookups._times_sent_at = math.inf  # times wait for another call
    request = rig.arrive(make_request(200))
    for _ in range(2):
        rig.begin(request)
        end_step(rig, compute(rig, request, 0))
        rig.step(preempted=["r"])
    assert len(sent(rig)) == 2
    assert messages == ["report", "times"] * 2


def test_overlapping_steps_end_in_their_order(rig):
    """With async scheduling, a step is scheduled before the last one has ended."""
    first, second = rig.arrive(make_request(200, "1")), rig.arrive(make_request(200, "2", cache_salt="s"))
    steps = []
    for request in (first, second):
        rig.begin(request)
        steps.append(compute(rig, request, 0))
    assert steps[0] < steps[1]
    end_step(rig, steps[0])
    assert [times.request_id for times in sent(rig)] == ["1"]
    rig.now += 1.0
    end_step(rig, steps[1])
    assert [times.first_token_seconds for times in sent(rig)] == [1.0, 2.0]


def test_times_wait_while_the_sidecar_does_not_answer(rig, monkeypatch):
    monkeypatch.setattr("lmcache_client.core.calls.PAUSE_SECONDS", 0.0)
    request = rig.computing()
    rig.drain_lookups()
    rig.session.is_down = True
    rig.lookups._calls._paused_until = float("inf")
    rig.lookups._calls._silent_epoch = rig.session.epoch
    end_step(rig, compute(rig, request, 0))
    assert not sent(rig)
    rig.session.is_down, rig.lookups._calls._paused_until = False, 0.0
    assert [times.request_id for times in sent(rig)] == ["r"]


def test_many_times_take_few_calls(rig):
    calls = itertools.count()
    release = rig.session.release

    def counted(*args, **kwargs):
        next(calls)
        release(*args, **kwargs)

    rig.session.release = counted
    gate = threading.Event()
    rig.lookups._queue.put(gate.wait)
    for number in range(600):
        request = make_request(40, str(number))
        rig.scheduler.on_new_request(request)
        rig.begin(request)
        end_step(rig, rig.step(new=[(str(number), blocks(2), 0, 40)]).timed_step)
    gate.set()
    assert len(sent(rig)) == 600
    assert next(calls) <= 5


def test_times_are_sent_when_the_side_is_taken_offline():
    rig = Rig()
    rig.computing()
    rig.scheduler.go_offline()
    rig.lookups._thread.join(60)
    assert [times.request_id for times in rig.session.times] == ["r"]
