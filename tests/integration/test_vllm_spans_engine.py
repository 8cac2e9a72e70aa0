"""Spans of real engines under the traces of their requests, as a receiver of OTLP gets them."""

from __future__ import annotations

import os
from itertools import count

import pytest

from testing.child_process import free_port, wait_until
from testing.engine.process import EngineProcess, ServedEngine, connector_config
from testing.otlp import OtlpReceiver, traceparent
from testing.processes import SidecarProcess
from tests.harness.sim_world import make_tokens
from tests.harness.spans import ATTRIBUTES, PARENT_ID

pytestmark = pytest.mark.vllm

ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""


def new_trace_ids():
    """Ids of traces that no other test uses."""
    return (os.urandom(12).hex() + f"{number:08x}" for number in count(1))


def check_received(spans):
    """Check parent, attributes and status of the connector's spans. Returns them by name."""
    ours = {span.name: span for span in spans if span.name.startswith("lmcache.")}
    for span in ours.values():
        assert span.parent_id == PARENT_ID
        assert span.attributes.keys() <= ATTRIBUTES[span.name] | {"lmcache.request_id"}
        assert span.start_ns <= span.end_ns
        assert not span.is_error
    return ours


def test_offline_engine_sends_spans_to_the_endpoint_of_its_arguments(tmp_path):
    trace_ids, prompts = new_trace_ids(), (make_tokens(1100) for _ in count())
    with (
        OtlpReceiver() as receiver,
        SidecarProcess(memory_size="64Mi") as sidecar,
        EngineProcess(
            tmp_path / "log",
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS),
            {"OTEL_BSP_SCHEDULE_DELAY": "50"},
            otlp_traces_endpoint=receiver.endpoint,
            disable_log_stats=False,
        ) as engine,
    ):
        engine.wait_ready()
        prompt = next(prompts)

        def is_hit(prompt):
            engine.scrub_kv()
            (answer,) = engine.generate(prompt)
            return answer.num_cached_tokens == 1024

        wait_until(lambda: is_hit(prompt), timeout=300)
        assert not check_received(receiver.spans), "requests without a trace have no spans"
        for tokens, names in (
            (next(prompts), ("lmcache.lookup", "lmcache.store")),
            (prompt, ("lmcache.lookup", "lmcache.load")),
        ):
            engine.scrub_kv()
            trace_id = next(trace_ids)
            engine.generate(tokens, trace_headers={"traceparent": traceparent(trace_id, PARENT_ID)})
            ours = check_received(receiver.wait_for(trace_id, "llm_request", *names))
            assert ours.keys() - {"lmcache.wait"} == set(names)
        assert ours["lmcache.load"].attributes["lmcache.loaded_tokens"] == 1024
        assert ours["lmcache.lookup"].attributes["lmcache.computed_tokens"] == 76
        unsampled = next(trace_ids)
        header = traceparent(unsampled, PARENT_ID, is_sampled=False)
        engine.generate(prompt, trace_headers={"traceparent": header})
        last = next(trace_ids)
        engine.generate(prompt, trace_headers={"traceparent": traceparent(last, PARENT_ID)})
        receiver.wait_for(last, "lmcache.lookup")
        assert not [span for span in receiver.spans if span.trace_id == unsampled]


def test_served_engine_puts_spans_under_the_trace_of_the_http_request(tmp_path):
    trace_ids, prompts = new_trace_ids(), (make_tokens(1100) for _ in count())
    with (
        OtlpReceiver() as receiver,
        SidecarProcess(memory_size="64Mi") as sidecar,
        ServedEngine(
            tmp_path / "log",
            free_port(),
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS),
            f"--otlp-traces-endpoint={receiver.endpoint}",
            environment={"OTEL_BSP_SCHEDULE_DELAY": "50"},
        ) as engine,
    ):
        engine.wait_ready()
        sidecar.wait_attached(engine.run_short_request)

        def complete(prompt):
            trace_id = next(trace_ids)
            answer = engine.complete(prompt, traceparent=traceparent(trace_id, PARENT_ID))
            spans = receiver.wait_for(trace_id, "llm_request", "lmcache.lookup")
            return trace_id, answer, spans

        def traced_hit():
            trace_id, answer, _ = complete(prompt)
            return trace_id if answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024 else None

        prompt = next(prompts)
        hit = wait_until(traced_hit, timeout=300)
        spans = receiver.wait_for(hit, "llm_request", "lmcache.lookup", "lmcache.load")
        ours = check_received(spans)
        assert ours["lmcache.load"].attributes["lmcache.loaded_tokens"] == 1024
        (request,) = [span for span in spans if span.name == "llm_request"]
        assert request.parent_id == PARENT_ID, "vLLM's own span has the same parent"
        assert request.start_ns <= ours["lmcache.lookup"].start_ns
        assert ours["lmcache.load"].end_ns <= request.end_ns
