"""OpenTelemetry spans of requests: ``lmcache.lookup``, ``lmcache.wait``, ``lmcache.load``, ``lmcache.store``.

The spans are children of the request's own trace, which the engine hands over as W3C headers. Requests
without headers, or whose sampled flag is not set, get no spans.

All spans are recorded on the scheduler side, because only this side knows the headers. A span is created when
it has ended. The engine's ``TracerProvider`` sends it on another thread.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from lmcache_client.core.jobs import LoadJob, StoreJob
from lmcache_client.core.requests import RequestState
from lmcache_client.core.tracing import Tracer
from lmcache_store.tiers.base import ROW_KEY_BYTES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

SCOPE = "lmcache"
"""Name of the instrumentation scope of all spans."""

_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
_PROPAGATOR = TraceContextTextMapPropagator()
_P = ParamSpec("_P")


def make_tracer(endpoint: str | None, clock: Callable[[], float]) -> SpanTracer:
    """Return a tracer of the process's provider. Without a provider, create a private one.

    vLLM creates the provider in the process of its engine core, except on headless nodes. ``endpoint``: OTLP
    endpoint for a private provider; None: the one in the environment. Raises ImportError without the SDK.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = private = TracerProvider()
        private.add_span_processor(BatchSpanProcessor(_make_exporter(endpoint)))
    return SpanTracer(provider.get_tracer(SCOPE), clock)


def _make_exporter(endpoint: str | None) -> SpanExporter:
    variable = next(filter(os.environ.get, _PROTOCOLS), _PROTOCOLS[0])
    protocol = os.environ.get(variable) or "grpc"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint)
    if protocol != "grpc":
        raise ValueError(f"{variable} is {protocol}, but must be grpc or http/protobuf")
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

    # Like vLLM, use TLS only if the URL says so.
    is_insecure = True if endpoint and not endpoint.startswith("https:") else None
    return grpc.OTLPSpanExporter(endpoint, is_insecure)


@dataclass(slots=True)
class _Trace:
    """Spans of one request that have not ended. Times are those of the scheduler side's clock, in seconds."""

    context: Context
    """Parent of all spans of the request."""
    state: RequestState
    asked_at: float
    answered_at: float | None = None
    """Time of the sidecar's first answer; None: not answered yet."""
    is_looking_up: bool = True
    held_at: float | None = None
    """Time since when the connector holds the request back; None: it does not."""
    num_found: int = 0
    """Chunks in memory at that time."""
    reasons: list[str] = field(default_factory=list)
    """Why the request is held back, in order."""
    loading_since: float | None = None
    load: dict[str, AttributeValue] = field(default_factory=dict)
    """Attributes of the load."""


class _Store(NamedTuple):
    """A store that has not ended."""

    trace: _Trace
    began_at: float
    num_chunks: int


def _never_raises(
    hook: Callable[Concatenate[SpanTracer, _P], None],
) -> Callable[Concatenate[SpanTracer, _P], None]:
    """Let the hook log its first exception and end all tracing: a trace must not stop the cache."""

    @functools.wraps(hook)
    def call(tracer: SpanTracer, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if tracer.is_broken:
            return
        try:
            hook(tracer, *args, **kwargs)
        except Exception:
            tracer.is_broken = True
            logger.exception("LMCache Cluster sends no more spans in this process; requests are not affected")

    return call


class SpanTracer(Tracer):
    """Hooks that record spans, see the module. Only the scheduler's thread calls them."""

    def __init__(self, tracer: trace.Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_broken = False
        """True after an exception: the hooks then do nothing."""
        self._tracer = tracer
        self._clock = clock
        self._traces: dict[str, _Trace] = {}
        self._stores: dict[int, _Store] = {}

    @_never_raises
    def begin(self, state: RequestState) -> None:
        """Begin a lookup, unless the request has no trace or is not sampled."""
        request_id = state.request.request_id
        if request_id in self._traces:  # it starts again
            self._end_wait(self._traces.pop(request_id))
        headers = getattr(state.request, "trace_headers", None)
        if not headers:
            return
        context = _PROPAGATOR.extract(headers)
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid and parent.trace_flags.sampled:
            self._traces[request_id] = _Trace(context, state, state.ticket.asked_at)

    @_never_raises
    def hold(self, request_id: str, reason: str) -> None:
        """Begin a wait, or add the reason to the present wait."""
        traced = self._traces.get(request_id)
        if traced is None:
            return
        _note_answer(traced)
        if traced.held_at is None:
            traced.held_at, traced.num_found, traced.reasons = self._clock(), traced.state.num_found, []
        if reason not in traced.reasons:
            traced.reasons.append(reason)

    @_never_raises
    def resume(self, request_id: str) -> None:
        """Record the wait, if there was one."""
        traced = self._traces.get(request_id)
        if traced is not None:
            _note_answer(traced)
            self._end_wait(traced)

    @_never_raises
    def end_lookup(self, request_id: str, num_loaded_tokens: int) -> None:
        """Record the lookup and its result."""
        traced = self._traces.get(request_id)
        if traced is not None:
            self._end_lookup(traced, num_loaded_tokens)

    @_never_raises
    def begin_load(self, job: LoadJob, num_tokens: int) -> None:
        """Begin a load."""
        traced = self._traces.get(job.request_id)
        if traced is not None:
            traced.loading_since = self._clock()
            num_chunks = [len(group.found.rows) if group.found else 0 for group in job.groups]
            traced.load = {"lmcache.loaded_tokens": num_tokens}
            if num_chunks:  # not a blended prompt, whose chunks lie in several documents
                traced.load["lmcache.chunks"] = max(num_chunks)

    @_never_raises
    def end_load(self, request_id: str) -> None:
        """Record the load. Its status is an error if it failed on a rank."""
        traced = self._traces.get(request_id)
        if traced is None or traced.loading_since is None:
            return
        error = "Some blocks were not loaded. The engine computes them." if traced.state.has_failed else ""
        self._record("lmcache.load", traced, traced.loading_since, self._clock(), traced.load, error)
        traced.loading_since = None
        if traced.state.is_finished:
            del self._traces[request_id]

    @_never_raises
    def begin_stores(self, request_id: str, jobs: Iterable[StoreJob]) -> None:
        """Begin a span for each store."""
        traced = self._traces.get(request_id)
        if traced is not None:
            now = self._clock()
            for job in jobs:
                num_chunks = max(len(group.keys) // ROW_KEY_BYTES for group in job.groups)
                self._stores[job.job_id] = _Store(traced, now, num_chunks)

    @_never_raises
    def end_store(self, job_id: int) -> None:
        """Record the store."""
        store = self._stores.pop(job_id, None)
        if store is not None:
            attributes: dict[str, AttributeValue] = {"lmcache.chunks": store.num_chunks}
            self._record("lmcache.store", store.trace, store.began_at, self._clock(), attributes)

    @_never_raises
    def finish(self, request_id: str) -> None:
        """Record what has not ended, except a load: it ends with ``end_load``."""
        traced = self._traces.get(request_id)
        if traced is None:
            return
        _note_answer(traced)
        self._end_wait(traced)
        self._end_lookup(traced)  # if the request ends before the engine has allocated blocks
        if traced.loading_since is None:
            del self._traces[request_id]

    @_never_raises
    def clear(self) -> None:
        """Forget all requests and stores without a record."""
        self._traces.clear()
        self._stores.clear()

    def _end_lookup(self, traced: _Trace, num_loaded_tokens: int | None = None) -> None:
        """Record the lookup, from the first hint until the sidecar's first answer."""
        if not traced.is_looking_up:
            return
        traced.is_looking_up = False
        state = traced.state
        attributes: dict[str, AttributeValue] = {
            "lmcache.is_answered": traced.answered_at is not None,
            "lmcache.prompt_tokens": state.request.num_tokens,
            "lmcache.prompt_chunks": len(state.ticket.hashes),
            "lmcache.found_chunks": state.num_found,
        }
        if num_loaded_tokens is not None:
            attributes["lmcache.engine_tokens"] = state.num_engine_tokens
            attributes["lmcache.loaded_tokens"] = num_loaded_tokens
            num_cached = state.num_engine_tokens + num_loaded_tokens
            attributes["lmcache.computed_tokens"] = state.request.num_tokens - num_cached
        ended_at = self._clock() if traced.answered_at is None else traced.answered_at
        self._record("lmcache.lookup", traced, traced.asked_at, ended_at, attributes)

    def _end_wait(self, traced: _Trace) -> None:
        """Record the wait, if the connector held the request back until now."""
        if traced.held_at is None:
            return
        attributes: dict[str, AttributeValue] = {
            "lmcache.wait_reasons": traced.reasons,
            "lmcache.arrived_chunks": max(0, traced.state.num_found - traced.num_found),
        }
        self._record("lmcache.wait", traced, traced.held_at, self._clock(), attributes)
        traced.held_at = None

    def _record(
        self,
        name: str,
        traced: _Trace,
        began_at: float,
        ended_at: float,
        attributes: dict[str, AttributeValue],
        error: str = "",
    ) -> None:
        offset = time.time() - self._clock()
        attributes["lmcache.request_id"] = traced.state.request.request_id
        start_time = int((offset + began_at) * 1e9)
        span = self._tracer.start_span(name, traced.context, attributes=attributes, start_time=start_time)
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(int((offset + ended_at) * 1e9))


def _note_answer(traced: _Trace) -> None:
    """Note the time of the sidecar's first answer, once the lookup thread has written all of it."""
    ticket = traced.state.ticket
    if traced.answered_at is None and ticket.answer is not None and not ticket.is_asking:
        traced.answered_at = max(traced.asked_at, ticket.answered_at)
