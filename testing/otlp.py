"""An OTLP receiver for tests: collects the spans that other processes send over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from testing.child_process import wait_until

_METHOD = "opentelemetry.proto.collector.trace.v1.TraceService"


class ReceivedSpan(NamedTuple):
    """One span as it arrived."""

    name: str
    trace_id: str
    """32 hexadecimal digits."""
    parent_id: str
    """16 hexadecimal digits; empty if the span is the root of its trace."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


def traceparent(trace_id: str, parent_id: str, *, is_sampled: bool = True) -> str:
    """Return the W3C header of a trace."""
    return f"00-{trace_id}-{parent_id}-{is_sampled:02x}"


class OtlpReceiver:
    """Receives spans on a local port, over gRPC or, with ``is_http``, over HTTP. A context manager."""

    def __init__(self, *, is_http: bool = False) -> None:
        self.spans: list[ReceivedSpan] = []
        self._resources = ExitStack()
        self.endpoint = self._serve_http() if is_http else self._serve_grpc()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def wait_for(self, trace_id: str, *names: str, timeout: float = 60) -> list[ReceivedSpan]:
        """Wait until a trace has spans of these names. Returns its spans in the order of their start."""

        def spans_of_trace() -> list[ReceivedSpan] | None:
            spans = [span for span in self.spans if span.trace_id == trace_id]
            is_complete = set(names) <= {span.name for span in spans}
            return sorted(spans, key=lambda span: span.start_ns) if is_complete else None

        what = f"spans {names} of trace {trace_id}"
        spans: list[ReceivedSpan] = wait_until(spans_of_trace, timeout=timeout, what=what)
        return spans

    def _receive(self, request: pb.ExportTraceServiceRequest) -> bytes:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += map(_parse, scope.spans)
        return pb.ExportTraceServiceResponse().SerializeToString()

    def _serve_grpc(self) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, _: self._receive(request), pb.ExportTraceServiceRequest.FromString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD, {"Export": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._resources.callback(lambda: server.stop(None).wait())
        return f"http://127.0.0.1:{port}"

    def _serve_http(self) -> str:
        receive = self._receive

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = receive(pb.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever)
        thread.start()
        for end in (server.server_close, thread.join, server.shutdown):
            self._resources.callback(end)
        return f"http://127.0.0.1:{server.server_port}/v1/traces"


def _parse(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {pair.key: _value(pair.value) for pair in span.attributes},
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _value(value: AnyValue) -> str | bool | int | float | bytes | Sequence[Any]:
    if value.HasField("array_value"):
        return [_value(item) for item in value.array_value.values]
    content: str | bool | int | float | bytes = getattr(value, str(value.WhichOneof("value")))
    return content
