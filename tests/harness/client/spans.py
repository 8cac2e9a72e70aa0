"""A process's tracer provider for tests, and trace headers of requests."""

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}

ATTRIBUTES = {
    "lmcache.lookup": {
        *("lmcache.is_answered", "lmcache.prompt_chunks", "lmcache.found_chunks", "lmcache.prompt_tokens"),
        *("lmcache.engine_tokens", "lmcache.loaded_tokens", "lmcache.computed_tokens"),
    },
    "lmcache.wait": {"lmcache.wait_reasons", "lmcache.arrived_chunks"},
    "lmcache.load": {"lmcache.loaded_tokens", "lmcache.chunks"},
    "lmcache.store": {"lmcache.chunks"},
}
"""All attributes of each span except the request id."""


class RecordedSpans:
    """A provider with the SDK's exporter in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> list[ReadableSpan]:
        """Return the spans since the last call, in the order of their ends. Checks what is true of all."""
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        for span in spans:
            check_span(span)
        return spans

    def close(self) -> None:
        self.provider.shutdown()


def check_span(span: ReadableSpan) -> None:
    """Check that the span belongs to the request's trace, and has only the documented attributes."""
    assert trace.format_trace_id(span.context.trace_id) == TRACE_ID
    assert span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == PARENT_ID
    assert span.start_time <= span.end_time
    attributes = dict(span.attributes or {})
    assert isinstance(attributes.pop("lmcache.request_id"), str)
    assert attributes.keys() <= ATTRIBUTES[span.name]


def figures(span: ReadableSpan) -> dict[str, object]:
    """Return the span's attributes without their prefix and without the request id."""
    attributes: dict[str, object] = {
        name.removeprefix("lmcache."): value for name, value in (span.attributes or {}).items()
    }
    del attributes["request_id"]
    return attributes


def milliseconds(span: ReadableSpan) -> int:
    """Return the length of the span, rounded."""
    assert span.end_time is not None
    assert span.start_time is not None
    return round((span.end_time - span.start_time) / 1e6)
