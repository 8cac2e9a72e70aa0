"""Spans of requests that vLLM hands over with their trace, under vLLM's own scheduler."""

import pytest
from opentelemetry import trace

from lmcache_client.core.tracing import NO_TRACER
from testing.processes import RedisProcess
from tests.harness.client.spans import SAMPLED, UNSAMPLED, RecordedSpans, figures
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import make_tokens, only_engine, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256)


@pytest.fixture
def recorded(monkeypatch):
    """A provider in this process, as vLLM creates it in its engine core."""
    recorded = RecordedSpans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", recorded.provider)
    yield recorded
    recorded.close()


def by_name(spans):
    assert len({span.name for span in spans}) == len(spans), "each name once"
    return {span.name: span for span in spans}


def assert_forgotten(engine):
    tracer = engine.scheduler.connector._scheduler._tracer
    assert not tracer._traces
    assert not tracer._stores


@pytest.mark.parametrize("runner", [1, 2])
def test_vllm_hands_over_the_trace_of_a_request(world, recorded, runner):
    prompt = make_tokens(CHUNK + 7)
    with world.engines(SimSettings(runner=runner)) as (engine,):
        assert recorded.take() == [], "requests without headers have no spans"
        engine.serve(prompt, trace_headers=SAMPLED)
        spans = by_name(recorded.take())
        assert spans.keys() == {"lmcache.lookup", "lmcache.store"}
        assert figures(spans["lmcache.lookup"])["computed_tokens"] == CHUNK + 7
        assert figures(spans["lmcache.store"]) == {"chunks": 1}
        engine.serve(prompt, trace_headers=SAMPLED)
        spans = by_name(recorded.take())
        assert spans.keys() == {"lmcache.lookup", "lmcache.load"}
        assert figures(spans["lmcache.lookup"])["loaded_tokens"] == CHUNK
        assert figures(spans["lmcache.load"]) == {"loaded_tokens": CHUNK, "chunks": 1}
        assert_forgotten(engine)


def test_unsampled_request_has_no_spans(world, recorded):
    with world.engines(SETTINGS) as (engine,):
        engine.serve(make_tokens(3 * CHUNK), trace_headers=UNSAMPLED)
        assert recorded.take() == []
        assert_forgotten(engine)


def test_engine_without_a_provider_has_no_tracer(world):
    with world.engines(SETTINGS) as (engine,):
        engine.serve(make_tokens(3 * CHUNK), trace_headers=SAMPLED)
        assert engine.scheduler.connector._scheduler._tracer is NO_TRACER


def test_aborted_requests_are_forgotten(world, recorded):
    with world.engines(SETTINGS) as (engine,):
        prompt = make_tokens(6 * CHUNK + 1)
        engine.serve(prompt)
        for num_steps in range(6):
            name = engine.add(prompt, trace_headers=SAMPLED)
            for _ in range(num_steps):
                engine.step()
            engine.abort(name)
            engine.run()
            engine.forget()
        recorded.take()
        assert_forgotten(engine)


@pytest.mark.redis
def test_load_from_redis_follows_a_wait_for_lower_tiers(recorded):
    prompt = make_tokens(8 * CHUNK + 1)
    with RedisProcess() as redis:
        with only_engine(SETTINGS, remote_url=redis.unix_url) as (sidecar, engine):
            engine.serve(prompt)
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
        with only_engine(SETTINGS, remote_url=redis.unix_url) as (_, engine):
            recorded.take()
            result = engine.results[engine.serve(prompt, trace_headers=SAMPLED)]
            spans = by_name(recorded.take())
    assert result.num_cached_tokens == 8 * CHUNK
    assert figures(spans["lmcache.wait"]) == {"wait_reasons": ("lower_tiers",), "arrived_chunks": 8}
    assert spans["lmcache.wait"].end_time <= spans["lmcache.load"].start_time
    assert spans["lmcache.lookup"].start_time <= spans["lmcache.wait"].start_time
