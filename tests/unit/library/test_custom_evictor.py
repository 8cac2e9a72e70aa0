"""Custom evictors in memory and disk backends, as in the LMCache 0.1-0.3 API."""

from collections import OrderedDict

import pytest

from lmcache.cache_engine import LMCacheEngine
from lmcache.storage_backend.evictor import BaseEvictor, DummyEvictor, LRUEvictor, PutStatus
from lmcache.storage_backend.local_backend import LMCLocalDiskBackend
from tests.harness.library.kv_cache import (
    CHUNK,
    is_same,
    make_chunk,
    make_config,
    make_key,
    make_kv,
    make_metadata,
    make_pool,
    make_tokens,
)
from tests.harness.loops import in_threads

CHUNK_BYTES = make_chunk().nbytes


class MostRecent(BaseEvictor):
    """An evictor that evicts the most recently used chunk, unlike any LRU, and records its calls."""

    def __init__(self, num_chunks: int) -> None:
        self.limit = num_chunks * CHUNK_BYTES
        self.calls: list[tuple[str, object]] = []

    def update_on_get(self, key, cache_dict):
        assert key in cache_dict
        self.calls.append(("get", key.chunk_hash))
        cache_dict.move_to_end(key)

    def update_on_put(self, cache_dict, cache_size):
        self.calls.append(("put", cache_size))
        assert isinstance(cache_dict, OrderedDict)
        if cache_size > self.limit:
            return [], PutStatus.ILLEGAL
        used_bytes, victims = sum(map(self.get_size, cache_dict.values())), []
        for key in reversed(cache_dict):
            if used_bytes + cache_size <= self.limit:
                break
            victims.append(key)
            used_bytes -= self.get_size(cache_dict[key])
        return victims, PutStatus.LEGAL


def names_in(backend) -> list[str]:
    return [key.chunk_hash for key in backend.dict]


def put(backend, names) -> None:
    for name in names:
        backend.put(make_key(name), make_chunk(seed=ord(name)))


def test_custom_evictor_chooses_victims(make_backend):
    backend, evictor = make_backend(), MostRecent(3)
    backend.evictor = evictor
    assert backend.evictor is evictor
    put(backend, "abcde")
    assert names_in(backend) == ["a", "b", "e"]
    assert [backend.contains(make_key(name)) for name in "abcde"] == [True, True, False, False, True]
    assert evictor.calls == [("put", CHUNK_BYTES)] * 5
    backend.get(make_key("a"))
    backend.get(make_key("d"))  # a miss does not count as use
    backend.contains(make_key("b"))  # contains() does not count as use
    assert evictor.calls[5:] == [("get", "a")]
    put(backend, "f")
    assert names_in(backend) == ["b", "e", "f"]
    assert backend.get(make_key("b")).equal(make_chunk(seed=ord("b")))
    assert backend.num_faults == 0


def test_new_evictor_gets_existing_chunks(make_backend):
    backend = make_backend()
    put(backend, "abcd")
    backend.get(make_key("a"))
    backend.evictor = MostRecent(4)
    assert names_in(backend) == ["b", "c", "d", "a"]
    put(backend, "e")
    assert names_in(backend) == ["b", "c", "d", "e"]


def test_assigned_lru_evictor_evicts_the_least_recently_used(make_backend):
    backend = make_backend()
    backend.evictor = LRUEvictor(3 * CHUNK_BYTES / 1024**3)
    put(backend, "abc")
    backend.get(make_key("a"))
    put(backend, "d")
    assert names_in(backend) == ["c", "a", "d"]
    put(backend, "a")  # overwritten
    assert names_in(backend) == ["c", "d", "a"]
    backend.remove(make_key("d"))
    put(backend, "e")
    assert names_in(backend) == ["c", "a", "e"]


@pytest.mark.parametrize(
    ("evictor", "retained"),
    [pytest.param(MostRecent(0), "", id="refused"), pytest.param(DummyEvictor(), "abcd", id="no victims")],
)
def test_chunks_that_the_evictor_gives_no_place_are_dropped_and_counted(make_backend, evictor, retained):
    backend = make_backend(4)
    backend.evictor = evictor
    put(backend, "abcdef")
    assert names_in(backend) == [*retained]
    assert [name for name in "abcdef" if backend.contains(make_key(name))] == [*retained]
    assert backend.num_faults == 6 - len(retained)


def test_short_chunks_count_as_full_chunks(make_backend):
    backend, evictor = make_backend(4), MostRecent(4)
    backend.evictor = evictor
    for number in range(40):
        backend.put(make_key(str(number)), make_chunk(1 + number % CHUNK, seed=number))
        assert backend.contains(make_key(str(number)))
        assert len(backend.dict) <= 4
    assert set(evictor.calls) == {("put", CHUNK_BYTES)}
    assert backend.num_faults == 0


def test_evictor_error_loses_only_the_new_chunk(make_backend):
    class Broken(MostRecent):
        def update_on_put(self, cache_dict, cache_size):
            raise RuntimeError("a bug in the policy")

        def update_on_get(self, key, cache_dict):
            raise RuntimeError("another")

    backend = make_backend()
    put(backend, "a")
    backend.evictor = Broken(3)
    put(backend, "b")
    assert names_in(backend) == ["a"]
    assert backend.get(make_key("a")).equal(make_chunk(seed=ord("a")))
    assert backend.num_faults == 3, "two errors of the evictor and a dropped chunk"
    backend.evictor = MostRecent(3)
    put(backend, "b")
    assert names_in(backend) == ["a", "b"]


def test_engine_reports_uses_of_a_prompt_from_tail_to_head(make_backend, monkeypatch):
    backend, evictor = make_backend(16), MostRecent(16)
    backend.evictor = evictor
    monkeypatch.setattr("lmcache.cache_engine.CreateStorageBackend", lambda *_: backend)
    engine = LMCacheEngine(make_config(), make_metadata())
    tokens, kv = make_tokens(4 * CHUNK), make_kv(4 * CHUNK)
    engine.store(tokens, kv)
    assert evictor.calls == [("put", CHUNK_BYTES)] * 4
    hashes = [key.chunk_hash for key in engine._keys(tokens)]
    retrieved, _ = engine.retrieve(tokens)
    assert is_same(retrieved, kv)
    assert evictor.calls[4:] == [("get", name) for name in reversed(hashes)]
    assert names_in(backend) == hashes[::-1]


def test_concurrent_calls_keep_the_dictionary_consistent(make_backend):
    backend, evictor = make_backend(8), MostRecent(6)
    backend.evictor = evictor

    def work(seed):
        for number in range(60):
            name = chr(ord("a") + (seed * 7 + number * 3) % 12)
            backend.put(make_key(name), make_chunk(seed=ord(name)))
            chunk = backend.get(make_key(name))
            assert chunk is None or chunk.equal(make_chunk(seed=ord(name)))

    in_threads(work, range(4))
    assert len(backend.dict) <= 6
    # A put is dropped and counted while readers hold two of the victims.
    assert [key for key in map(make_key, "abcdefghijkl") if backend.contains(key)] == sorted(backend.dict)


def test_missed_read_does_not_remove_a_concurrently_put_chunk(tmp_path, monkeypatch):
    """If the read dropped the chunk, the evictor would never see its file again."""
    backend = LMCLocalDiskBackend(make_config(str(tmp_path / "cache")), make_pool(8), "cpu")
    backend.evictor = MostRecent(4)
    load = backend._tier.load

    def load_and_put(*arguments):
        answer = load(*arguments)
        put(backend, "a")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(backend._tier, "load", load_and_put)
        assert backend.get(make_key("a")) is None
    assert list(backend.dict) == [make_key("a")]
    assert names_in(backend) == ["a"]
    backend.close()


def test_files_of_an_earlier_process_are_evicted_first(tmp_path):
    config, pool = make_config(str(tmp_path / "cache")), make_pool(4)
    previous = LMCLocalDiskBackend(config, pool, "cpu")
    put(previous, "abcd")
    previous.close()
    backend = LMCLocalDiskBackend(config, pool, "cpu")
    assert backend.get(make_key("a")) is not None  # the backend knows the file from now on
    backend.evictor = MostRecent(4)
    put(backend, "ef")
    assert names_in(backend) == ["a", "e", "f"]
    assert backend.num_faults == 0
    backend.close()
