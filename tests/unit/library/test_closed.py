"""Closed engines and backends: reads miss, writes are dropped, and running calls finish."""

import threading

import pytest

from lmcache.cache_engine import LMCacheEngine
from lmcache.storage_backend.guard import UseGate
from tests.harness.library.kv_cache import (
    CHUNK,
    is_same,
    make_chunk,
    make_config,
    make_key,
    make_kv,
    make_metadata,
    make_tokens,
)
from tests.harness.loops import in_threads


@pytest.fixture
def engine(config, connector):
    engine = LMCacheEngine(config, make_metadata())
    yield engine
    engine.close()
    assert not connector.calls["after close"]


def test_closed_engine_misses_and_drops(engine):
    tokens, kv = make_tokens(3 * CHUNK), make_kv(3 * CHUNK)
    engine.store(tokens, kv)
    backend, key = engine.engine_, engine._keys(tokens)[0]
    engine.close()
    engine.close()
    assert engine.lookup(tokens) == 0
    assert engine.retrieve(tokens)[0] == ()
    engine.store(tokens, kv)
    engine.store(tokens, kv, blocking=False)
    assert engine.retrieve(tokens)[0] == ()
    assert not backend.contains(key)
    assert backend.get(key) is None
    assert list(backend.batched_get([key, key])) == [None, None]
    backend.put(key, make_chunk())
    backend.batched_put([(key, make_chunk())], blocking=False)
    for part in (
        backend,
        getattr(backend, "local_store", backend),
        getattr(backend, "remote_store", backend),
    ):
        if hasattr(part, "num_faults"):
            assert part.num_faults > 0, "dropped chunks are counted"
        if hasattr(part, "remove"):
            part.remove(key)


def test_close_during_concurrent_calls_causes_no_errors(engine):
    tokens = make_tokens(6 * CHUNK)
    started = threading.Barrier(5)

    def work(seed):
        thread_tokens, thread_kv = tokens.roll(seed), make_kv(6 * CHUNK, seed=seed)
        engine.store(thread_tokens, thread_kv)
        started.wait()
        for _ in range(60):
            retrieved, mask = engine.retrieve(thread_tokens)
            if mask.all():
                assert is_same(retrieved, thread_kv)
            engine.store(thread_tokens, thread_kv, skip_existing=False)
            engine.lookup(thread_tokens)

    def close():
        started.wait()
        engine.close()

    in_threads(lambda seed: work(seed) if seed else close(), range(5))
    assert engine.retrieve(tokens)[0] == ()


def test_close_waits_for_running_calls():
    gate, is_closed, events = UseGate(), threading.Event(), []

    def close():
        gate.close()
        events.append("closed")
        is_closed.set()

    with gate.enter() as may_use:
        assert may_use
        closer = threading.Thread(target=close)
        closer.start()
        while True:  # until the gate refuses new calls
            with gate.enter() as may_enter:
                if not may_enter:
                    break
        assert not is_closed.is_set()
        events.append("left")
    closer.join()
    assert events == ["left", "closed"]


def test_chunk_stays_readable_while_the_engine_closes():
    engine = LMCacheEngine(make_config(), make_metadata())
    engine.engine_.put(make_key("a"), make_chunk(seed=3))
    closer = threading.Thread(target=engine.close)
    with engine.engine_.prefix([make_key("a")]) as chunks:
        closer.start()
        while engine.engine_.contains(make_key("a")):
            pass
        assert chunks[0].equal(make_chunk(seed=3))
        del chunks
    closer.join()
