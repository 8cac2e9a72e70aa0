"""Closed means closed: misses and drops, while calls that are under way end well."""

from __future__ import annotations

import threading

import pytest

from lmcache.cache_engine import LMCacheEngine
from lmcache.storage_backend import remote_backend
from lmcache.storage_backend.guard import UseGate
from tests.harness.dict_connector import DictConnector
from tests.harness.kv_cache import (
    CHUNK,
    is_same,
    make_chunk,
    make_config,
    make_key,
    make_kv,
    make_metadata,
    make_tokens,
)

REMOTE = {"remote_url": "lm://localhost:1", "remote_serde": "torch"}
KINDS = {
    "memory": ("cpu", {}),
    "disk": ("disk", {}),
    "remote": (None, REMOTE),
    "pipelined": (None, {**REMOTE, "pipelined_backend": True}),
    "hybrid": ("cpu", REMOTE),
    "hybrid with a disk": ("disk", {**REMOTE, "pipelined_backend": True}),
}


@pytest.fixture(params=KINDS)
def engine(request, tmp_path, monkeypatch):
    connector = DictConnector()
    monkeypatch.setattr(remote_backend, "CreateConnector", lambda url: connector)
    device, options = KINDS[request.param]
    engine = LMCacheEngine(
        make_config(str(tmp_path / "cache") if device == "disk" else device, **options), make_metadata()
    )
    yield engine
    engine.close()
    assert not connector.calls["after close"]


def test_after_close_everything_is_a_miss(engine):
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
            assert part.num_faults > 0, "what was dropped is counted"
        if hasattr(part, "remove"):
            part.remove(key)


def test_threads_may_be_at_work_while_it_closes(engine):
    tokens = make_tokens(6 * CHUNK)
    started, errors = threading.Barrier(5), []

    def work(seed):
        mine, own = tokens.roll(seed), make_kv(6 * CHUNK, seed=seed)
        engine.store(mine, own)
        started.wait()
        try:
            for _ in range(200):
                retrieved, found = engine.retrieve(mine)
                if found.all():
                    assert is_same(retrieved, own)
                engine.store(mine, own, skip_existing=False)
                engine.lookup(mine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    for thread in threads:
        thread.join()
    assert not errors
    assert engine.retrieve(tokens)[0] == ()


def test_closing_waits_for_who_is_inside():
    gate, is_closed, left = UseGate(), threading.Event(), []
    with gate.enter() as may_use:
        assert may_use
        closer = threading.Thread(target=lambda: (gate.close(), left.append("closed"), is_closed.set()))
        closer.start()
        while True:  # until nobody is let in any more
            with gate.enter() as late:
                if not late:
                    break
        assert not is_closed.is_set()
        left.append("left")
    closer.join()
    assert left == ["left", "closed"]


def test_a_chunk_under_a_reader_stays_while_it_closes():
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
