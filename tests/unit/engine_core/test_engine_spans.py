"""Spans of requests on the scheduler side, recorded by OpenTelemetry's SDK."""

import logging
import threading

import pytest
from opentelemetry.trace import StatusCode

from lmcache_client.core.spans import SpanTracer
from tests.harness.client.scheduler_rig import Rig, blocks, job_ids, make_request
from tests.harness.client.spans import SAMPLED, UNSAMPLED, RecordedSpans, figures, milliseconds


@pytest.fixture
def recorded():
    recorded = RecordedSpans()
    yield recorded
    recorded.close()


class TracedRig(Rig):
    def __init__(self, provider):
        self.now = 0.0
        self.tracer = SpanTracer(provider.get_tracer("test"), lambda: self.now)
        self.storing = set()
        super().__init__(tracer=self.tracer)


@pytest.fixture
def rig(recorded):
    rig = TracedRig(recorded.provider)
    yield rig
    end_stores(rig)
    assert not rig.tracer._traces, "requests are forgotten when they end"
    assert not rig.tracer._stores
    rig.scheduler.go_offline()


def traced(num_tokens, request_id="r", headers=SAMPLED, **fields):
    return make_request(num_tokens, request_id, trace_headers=headers, **fields)


def start(rig, request, num_external=0):
    """Let the engine allocate the request's blocks and schedule it."""
    num_blocks = -(-request.num_tokens // 32)
    rig.allocate(request, blocks(num_blocks), num_external)
    if num_external:
        rig.step()
        rig.now += 0.02
        rig.report(received=[request.request_id])
    new = (request.request_id, blocks(num_blocks), num_external, request.num_tokens - num_external)
    rig.storing |= job_ids(rig.step(new=[new]))


def end(rig, request):
    request.num_computed_tokens = request.num_tokens
    rig.finish(request)


def run(rig, request, num_external=0):
    """Run a request from its allocation to its end."""
    start(rig, request, num_external)
    end(rig, request)


def compute(rig, **fields):
    """Run a request that finds nothing."""
    request = rig.arrive(traced(200, **fields))
    assert rig.match(request) == (0, False)
    run(rig, request)


def end_stores(rig):
    rig.report(ended=rig.storing)
    rig.storing.clear()


def test_hit_has_a_lookup_and_a_load(rig, recorded):
    request = rig.matched(traced(200))
    start(rig, request, 192)
    lookup, load = recorded.take()
    assert (lookup.name, load.name) == ("lmcache.lookup", "lmcache.load")
    assert figures(lookup) == {
        "is_answered": True,
        "prompt_tokens": 200,
        "prompt_chunks": 3,
        "found_chunks": 3,
        "engine_tokens": 0,
        "loaded_tokens": 192,
        "computed_tokens": 8,
    }
    assert figures(load) == {"loaded_tokens": 192, "chunks": 3}
    assert load.attributes["lmcache.request_id"] == "r"
    assert load.status.is_unset
    assert milliseconds(load) == 20
    end(rig, request)
    assert recorded.take() == []


def test_computed_chunks_have_a_store_that_may_end_after_the_request(rig, recorded):
    compute(rig)
    (lookup,) = recorded.take()
    assert figures(lookup)["computed_tokens"] == 200
    rig.now += 0.5
    end_stores(rig)
    (store,) = recorded.take()
    assert (store.name, figures(store)) == ("lmcache.store", {"chunks": 3})
    assert milliseconds(store) == 500


def test_store_that_begins_with_the_end_of_its_request_is_recorded(rig, recorded):
    request = rig.computing(traced(200))
    rig.step(new=[("r", blocks(7), 0, 10)])
    end(rig, request)
    rig.storing |= job_ids(rig.step())
    recorded.take()
    end_stores(rig)
    (store,) = recorded.take()
    assert figures(store) == {"chunks": 3}


def test_lookup_ends_with_the_answer_and_not_with_the_wait_in_the_engines_queue(rig, recorded):
    rig.session.before_lookup = lambda: setattr(rig, "now", 0.004)
    request = rig.arrive(traced(200))
    rig.now = 0.5
    assert rig.match(request) == (0, False)
    run(rig, request)
    (lookup,) = recorded.take()
    assert milliseconds(lookup) == 4


def test_unanswered_lookup_ends_when_the_wait_for_its_answer_ends(rig, recorded):
    gate = threading.Event()
    rig.session.before_lookup = gate.wait
    request = traced(200)
    rig.scheduler.on_new_request(request)
    assert rig.match(request) == (None, False)
    rig.now = 0.5
    assert rig.match(request) == (0, False)
    run(rig, request)
    wait, lookup = recorded.take()
    assert (wait.name, lookup.name) == ("lmcache.wait", "lmcache.lookup")
    assert figures(lookup)["is_answered"] is False
    assert milliseconds(lookup) == milliseconds(wait) == 500
    gate.set()


def test_wait_for_lower_tiers_counts_the_chunks_that_arrive(rig, recorded):
    request = rig.waiting(traced(200))
    rig.stored(1)
    rig.now = 0.01
    assert rig.match(request) == (None, False)
    rig.stored(3)
    rig.now = 0.02
    assert rig.match(request) == (192, True)
    (wait,) = recorded.take()
    assert figures(wait) == {"wait_reasons": ("lower_tiers",), "arrived_chunks": 3}
    assert milliseconds(wait) == 20
    assert rig.match(request) == (192, True), "the engine asks again while it has no free blocks"
    assert recorded.take() == []
    run(rig, request, 192)


def test_wait_for_rows_of_another_request_names_this_reason(rig, recorded):
    first = rig.arrive(traced(200, "first", headers=None))
    assert rig.match(first) == (0, False)
    start(rig, first)
    second = rig.arrive(traced(200, "second"))
    assert rig.match(second) == (None, False)
    rig.stored(3)
    end_stores(rig)
    rig.now = 0.03
    assert rig.match(second) == (192, True)
    (wait,) = recorded.take()
    assert figures(wait) == {"wait_reasons": ("other_request",), "arrived_chunks": 3}
    assert wait.attributes["lmcache.request_id"] == "second"
    start(rig, second, 192)
    for request in (first, second):
        end(rig, request)


def test_wait_for_free_blocks_of_the_engine_names_this_reason(rig, recorded):
    rig.stored(3)
    rig.scheduler._open_loads.begin(make_request(200, "other"), 1000)
    request = rig.arrive(traced(200))
    for _ in range(3):
        assert rig.match(request) == (None, False)
        rig.now += 0.01
    rig.scheduler._open_loads.forget("other")
    assert rig.match(request) == (192, True)
    (wait,) = recorded.take()
    assert (figures(wait)["wait_reasons"], milliseconds(wait)) == (("engine_memory",), 30)
    run(rig, request, 192)


def test_failed_load_is_an_error(rig, recorded):
    request = rig.loading(traced(200))
    rig.report(failed=["r"], received=["r"])
    lookup, load = recorded.take()
    assert (lookup.status.status_code, load.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert rig.match(request) == (0, False)
    run(rig, request)
    (lookup,) = recorded.take()
    assert lookup.name == "lmcache.lookup", "the request starts again"


def test_request_that_ends_during_its_load_records_the_load(rig, recorded):
    request = rig.loading(traced(200))
    rig.finish(request)
    assert [span.name for span in recorded.take()] == ["lmcache.lookup"]
    rig.report(received=["r"])
    assert [span.name for span in recorded.take()] == ["lmcache.load"]


def test_request_that_is_forgotten_during_its_load_records_the_load(rig, recorded):
    """Replacing the adapter of a request forgets it."""
    request = rig.loading(traced(200))
    rig.scheduler.forget(lambda _: True)
    rig.report(received=["r"])
    rig.finish(request)
    assert [span.name for span in recorded.take()] == ["lmcache.lookup", "lmcache.load"]


def test_request_that_ends_in_the_queue_records_its_wait_and_lookup(rig, recorded):
    request = rig.waiting(traced(200))
    rig.now = 0.05
    rig.finish(request)
    wait, lookup = recorded.take()
    assert milliseconds(wait) == 50
    assert "lmcache.loaded_tokens" not in lookup.attributes, "nothing was decided"


def test_preempted_request_has_a_second_lookup(rig, recorded):
    request = rig.arrive(traced(200))
    rig.match(request)
    start(rig, request)
    rig.step(preempted=["r"])
    rig.match(request)
    rig.drain_lookups()
    assert rig.match(request) == (0, False)
    run(rig, request)
    names = [span.name for span in recorded.take()]
    assert names.count("lmcache.lookup") == 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *(
            {"trace_headers": headers}
            for headers in (None, {}, UNSAMPLED, {"traceparent": "no trace"}, {"tracestate": "a=b"})
        ),
    ],
)
def test_request_without_a_sampled_trace_has_no_spans(rig, recorded, fields):
    rig.stored(3)
    request = rig.arrive(make_request(200, **fields))
    rig.match(request)
    run(rig, request, 192)
    assert recorded.take() == []


def test_offline_side_forgets_all_spans(rig, recorded):
    request = rig.arrive(traced(200))
    rig.match(request)
    start(rig, request)
    recorded.take()
    rig.scheduler.go_offline()
    end_stores(rig)
    assert recorded.take() == []
    assert not rig.tracer._stores


def test_exception_of_a_span_processor_ends_only_the_tracing(rig, recorded, monkeypatch, caplog):
    def fail(span):
        raise RuntimeError("the processor is broken")

    monkeypatch.setattr(recorded.provider._active_span_processor, "on_end", fail)
    rig.stored(3)
    with caplog.at_level(logging.ERROR):
        for name in ("a", "b"):
            request = rig.arrive(traced(200, name))
            assert rig.match(request) == (192, True)
            start(rig, request, 192)
            end(rig, request)
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is logged once"
    assert "sends no more spans" in caplog.text
    rig.tracer._traces.clear()
