import threading

import pytest
import torch

from lmcache.storage_backend import remote_backend
from lmcache.storage_backend.hybrid_backend import LMCHybridBackend
from lmcache.storage_backend.remote_backend import LMCPipelinedRemoteBackend
from lmcache_store.tiers.disk.tier import DiskTier
from testing.child_process import wait_until
from tests.harness.library.kv_cache import make_chunk, make_config, make_key, make_metadata, make_pool


def open_backend(local_device: str = "cpu", **changes) -> LMCHybridBackend:
    options = {"remote_url": "lm://localhost:1", "remote_serde": "torch", **changes}
    return LMCHybridBackend(make_config(local_device, **options), make_metadata(), make_pool(), "cpu")


@pytest.fixture(params=["cpu", "disk", "pipelined"])
def backend(request, connector, tmp_path):
    device = str(tmp_path / "cache") if request.param == "disk" else "cpu"
    backend = open_backend(device, pipelined_backend=request.param == "pipelined")
    yield backend
    backend.close()
    assert connector.is_closed
    assert not connector.calls["after close"]


def key(name: str):
    return make_key(name)


def put_only(store, names: str) -> None:
    for name in names:
        store.put(key(name), make_chunk(seed=ord(name)))


def check(chunks, names: list[str | None]) -> None:
    chunks = list(chunks)
    assert len(chunks) == len(names)
    for chunk, name in zip(chunks, names, strict=True):
        assert (chunk is None) == (name is None)
        assert name is None or torch.equal(chunk, make_chunk(seed=ord(name)))


def test_puts_reach_both_backends(backend):
    put_only(backend, "a")
    backend.put(key("b"), make_chunk(seed=ord("b")), blocking=False)
    assert backend.local_store.contains(key("b")), "the local put always completes before the call returns"
    wait_until(lambda: backend.remote_store.contains(key("b")))
    for store in (backend, backend.local_store, backend.remote_store):
        check([store.get(key("a")), store.get(key("b"))], ["a", "b"])


def test_chunks_fetched_from_remote_are_stored_locally(backend, connector):
    put_only(backend.remote_store, "ab")
    assert backend.contains(key("a"))
    check([backend.get(key("a"))], ["a"])
    check(backend.batched_get([key("a"), key("b")]), ["a", "b"])
    connector.is_down = True
    check(backend.batched_get([key("a"), key("b")]), ["a", "b"])
    assert backend.get(key("c")) is None


def test_defect_02_stores_fetched_chunks_under_their_own_keys(backend):
    put_only(backend.remote_store, "ac")
    check(backend.batched_get([key("a"), key("b"), key("c")]), ["a", None, "c"])
    assert not backend.local_store.contains(key("b"))
    check([backend.local_store.get(key(name)) for name in "ac"], ["a", "c"])


def test_fetches_unreadable_local_chunk_from_remote(backend, monkeypatch):
    put_only(backend, "ab")
    get = backend.local_store.get
    monkeypatch.setattr(backend.local_store, "get", lambda name: None if name == key("b") else get(name))
    check([backend.get(key("b"))], ["b"])


def test_prefix_mixes_local_and_remote_chunks(backend):
    put_only(backend.local_store, "ace")
    put_only(backend.remote_store, "bdf")
    keys = [key(name) for name in "abcdefg"]
    assert backend.prefix_length(keys) == 6
    check(backend.batched_get(keys), ["a", "b", "c", "d", "e", "f", None])


def test_defect_26_fetches_nothing_behind_a_miss_or_at_start(backend, connector):
    assert not connector.calls
    put_only(backend.remote_store, "a")
    put_only(backend.remote_store, "cdefghijklmnopqrstuvwxyz")
    with backend.prefix([key(name) for name in "abcdefghijkl"]) as chunks:
        check(chunks, ["a"])
    if isinstance(backend.remote_store, LMCPipelinedRemoteBackend):
        backend.remote_store._network.submit(int).result()  # wait for all queued fetches
    assert connector.calls["get"] <= 2 + remote_backend._WINDOW
    assert connector.calls["exists"] == 0


def test_fetch_does_not_undo_a_concurrent_put(backend, connector, monkeypatch):
    put_only(backend.remote_store, "a")
    fetch = connector.get

    def put_during_fetch(name):
        content = fetch(name)
        backend.put(key("a"), make_chunk(seed=ord("b")))
        return content

    monkeypatch.setattr(connector, "get", put_during_fetch)
    backend.get(key("a"))
    check([backend.get(key("a"))], ["b"])


def test_defect_11_failed_remote_backend_leaves_no_threads_or_locks(connector, tmp_path):
    before = threading.active_count()
    for device in ("cpu", str(tmp_path)):
        with pytest.raises(ValueError, match="serde"):
            open_backend(device, remote_serde="unknown", pipelined_backend=True)
    wait_until(lambda: threading.active_count() == before)
    DiskTier(tmp_path, 1 << 20).close()  # the directory is not locked
