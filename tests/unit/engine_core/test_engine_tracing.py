"""The choice whether an engine's process records spans, and what it costs when it does not."""

import subprocess
import sys
import threading

import pytest
from opentelemetry import trace

from lmcache_client.core.tracer_choice import make_tracer
from lmcache_client.core.tracing import NO_TRACER
from testing.child_process import SOURCES
from testing.otlp import OtlpReceiver
from tests.harness.client.scheduler_rig import Rig, blocks, job_ids, make_request
from tests.harness.client.spans import PARENT_ID, SAMPLED, TRACE_ID, RecordedSpans

VARIABLES = (
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"),
    *("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run_python(code, **environment):
    command = [sys.executable, "-c", code]
    paths = {"PYTHONPATH": SOURCES, "PATH": ""}
    subprocess.run(command, env={**paths, **environment}, check=True, timeout=60)


def span_processor(rig):
    """The span processors of the provider that ``make_tracer`` created."""
    return rig.scheduler._tracer._tracer.span_processor


def run_request(rig, request):
    """A request with a load and a store, from its arrival to its end."""
    rig.arrive(request)
    assert rig.begin(request) == 192
    rig.step()
    rig.report(received=[request.request_id])
    meta = rig.step(new=[(request.request_id, blocks(10), 192, request.num_tokens - 192)])
    request.num_computed_tokens = request.num_tokens
    rig.finish(request)
    rig.report(ended=job_ids(meta), sent=[request.request_id])


@pytest.mark.parametrize("imported", ["", "import opentelemetry.trace, opentelemetry.sdk.trace"])
def test_process_without_an_endpoint_records_nothing_and_imports_nothing_of_opentelemetry(imported):
    run_python(
        f"import sys\n{imported}\n"
        "from lmcache_client.core.scheduler import SchedulerSide\n"
        "from lmcache_client.core.tracer_choice import NO_TRACER, make_tracer\n"
        "assert make_tracer() is SchedulerSide(None, None)._tracer is NO_TRACER\n"
        f"assert {imported!r} or not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert 'lmcache_client.core.spans' not in sys.modules\n"
    )


@pytest.mark.parametrize("absent", ["opentelemetry", "opentelemetry.sdk.trace", "opentelemetry.exporter"])
def test_absent_packages_leave_the_engine_without_spans_and_name_the_remedy(absent):
    run_python(
        "import logging, sys\n"
        f"sys.modules[{absent!r}] = None\n"
        "from lmcache_client.core.tracer_choice import NO_TRACER, logger, make_tracer\n"
        "texts = []\n"
        "logger.addFilter(lambda record: texts.append(record.getMessage()))\n"
        "assert make_tracer('http://127.0.0.1:1') is NO_TRACER\n"
        "assert len(texts) == 1 and 'install opentelemetry-sdk' in texts[0], texts\n"
    )


def test_unknown_protocol_leaves_the_engine_without_spans_and_is_named(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert make_tracer("http://127.0.0.1:1") is NO_TRACER
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is http/json, but must be grpc or http/protobuf" in caplog.text


@pytest.mark.parametrize("value", ["true", "True "])
def test_disabled_sdk_records_nothing(monkeypatch, value):
    monkeypatch.setenv("OTEL_SDK_DISABLED", value)
    assert make_tracer("http://127.0.0.1:1") is NO_TRACER


def test_provider_of_the_process_is_used_without_an_endpoint(monkeypatch):
    recorded = RecordedSpans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", recorded.provider)
    rig = Rig(tracer=make_tracer(clock=lambda: rig.now))
    rig.stored(3)
    run_request(rig, make_request(264, trace_headers=SAMPLED))
    names = [span.name for span in recorded.take()]
    assert names == ["lmcache.lookup", "lmcache.load", "lmcache.store"]
    rig.scheduler.go_offline()
    recorded.close()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("source", ["configuration", "environment"])
def test_private_provider_sends_to_the_configured_endpoint(monkeypatch, protocol, source):
    with OtlpReceiver(is_http=protocol != "grpc") as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        if source == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint)
        rig = Rig(
            tracer=make_tracer(
                receiver.endpoint if source == "configuration" else None, clock=lambda: rig.now
            )
        )
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), "the process has none"
        rig.stored(3)
        run_request(rig, make_request(264, trace_headers=SAMPLED))
        rig.scheduler.go_offline()
        span_processor(rig).shutdown()
        spans = receiver.wait_for(TRACE_ID, "lmcache.lookup", "lmcache.load", "lmcache.store")
    assert {span.parent_id for span in spans} == {PARENT_ID}
    assert {span.attributes["lmcache.request_id"] for span in spans} == {"r"}


def test_spans_are_sent_on_another_thread(monkeypatch):
    rig = Rig(tracer=make_tracer("http://127.0.0.1:1", clock=lambda: rig.now))
    senders = []
    (processor,) = span_processor(rig)._span_processors
    monkeypatch.setattr(
        processor.span_exporter, "export", lambda spans: senders.append((threading.get_ident(), len(spans)))
    )
    rig.stored(3)
    run_request(rig, make_request(264, trace_headers=SAMPLED))
    rig.scheduler.go_offline()
    span_processor(rig).shutdown()
    assert sum(number for _, number in senders) == 3
    assert threading.get_ident() not in {thread for thread, _ in senders}
