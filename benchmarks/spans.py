"""Measure what OpenTelemetry spans cost the scheduler's thread: processor time for each request.

Each round runs the hooks of requests with all four spans: off, with a trace that is not sampled, and sampled.
The SDK's batch processor takes the spans, and an exporter drops them on its own thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.report import Report, at_least, of
from lmcache.engines.core.jobs import LoadJob, StoreJob
from lmcache.engines.core.spans import SpanTracer
from lmcache.engines.core.tracing import LOWER_TIERS, NO_TRACER, Tracer

ROUNDS, REQUESTS = 15, 300
MIN_REQUESTS_PER_SECOND = 50.0
SHARE = 0.01
_PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0{}"


class DroppingExporter(SpanExporter):
    """Counts spans and drops them."""

    num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


def microseconds(tracer: Tracer, headers: dict[str, str] | None) -> float:
    """Return the processor time of one request's hooks on this thread."""
    ticket: Any = SimpleNamespace(
        asked_at=0.0, answered_at=0.0, answer=(), is_asking=False, hashes=[b""] * 30
    )
    began = time.thread_time()
    for number in range(REQUESTS):
        request_id = f"cmpl-{number}"
        request = SimpleNamespace(request_id=request_id, trace_headers=headers, num_tokens=7700)
        state: Any = SimpleNamespace(
            request=request,
            ticket=ticket,
            num_found=30,
            num_engine_tokens=0,
            has_failed=False,
            is_finished=False,
        )
        tracer.begin(state)
        tracer.hold(request_id, LOWER_TIERS)
        tracer.resume(request_id)
        tracer.end_lookup(request_id, 7680)
        tracer.begin_load(LoadJob(request_id, (SimpleNamespace(found=None),)), 7680)  # type: ignore[arg-type]
        tracer.end_load(request_id)
        stores = [StoreJob(number, request_id, (SimpleNamespace(keys=bytes(32)),))]  # type: ignore[arg-type]
        tracer.begin_stores(request_id, stores)
        tracer.finish(request_id)
        tracer.end_store(number)
    return (time.thread_time() - began) / REQUESTS * 1e6


def run() -> Report:
    exporter, provider = DroppingExporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=4 * ROUNDS * REQUESTS))
    tracer = SpanTracer(provider.get_tracer("benchmark"))
    rounds = [
        (
            microseconds(NO_TRACER, None),
            microseconds(tracer, {"traceparent": _PARENT.format(0)}),
            microseconds(tracer, {"traceparent": _PARENT.format(1)}),
        )
        for _ in range(ROUNDS)
    ]
    provider.shutdown()
    assert exporter.num_spans == 4 * ROUNDS * REQUESTS, "a request has not all four spans"
    loop, unsampled, sampled = (statistics.median(column) for column in zip(*rounds, strict=True))
    figures = [
        of("the loop of the benchmark, with hooks that are off", loop, "us a request"),
        of("a trace that is not sampled", unsampled - loop, "us a request"),
        of("a sampled trace, four spans", sampled - loop, "us a request"),
        at_least(
            "requests per second whose spans take 1 % of the scheduler's thread, all sampled",
            SHARE / (sampled - loop) * 1e6,
            "requests/s",
            MIN_REQUESTS_PER_SECOND,
        ),
    ]
    return Report("spans", f"median of {ROUNDS} rounds of {REQUESTS} requests", figures)
