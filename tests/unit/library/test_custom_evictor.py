"""A user's own evictor decides: in memory and in a directory, as the LMCache 0.1-0.3 API says."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest

from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.evictor import BaseEvictor, DummyEvictor, LRUEvictor, PutStatus
from lmcache.storage_backend.local_backend import LMCLocalBackend, LMCLocalDiskBackend
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

CHUNK_BYTES = make_chunk().nbytes


class MostRecent(BaseEvictor):
    """Evicts what was used last, and notes all that it is asked: no LRU ever looks like this."""

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
        taken, victims = sum(map(self.get_size, cache_dict.values())), []
        for key in reversed(cache_dict):
            if taken + cache_size <= self.limit:
                break
            victims.append(key)
            taken -= self.get_size(cache_dict[key])
        return victims, PutStatus.LEGAL


@pytest.fixture(params=["memory", "disk"])
def make_backend(request, tmp_path):
    backends = []

    def make(num_chunks: float = 8):
        size = num_chunks * CHUNK_BYTES / 1024**3
        kind, device = LMCLocalBackend, "cpu"
        if request.param == "disk":
            kind, device = LMCLocalDiskBackend, str(tmp_path / "cache")
        pool = LMCacheMemPoolMetadata(make_metadata().kv_shape, make_chunk().dtype, size)
        backends.append(kind(make_config(device), pool, "cpu"))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


def names_in(backend) -> list[str]:
    return [key.chunk_hash for key in backend.dict]


def put(backend, names) -> None:
    for name in names:
        backend.put(make_key(name), make_chunk(seed=ord(name)))


def test_a_custom_evictor_decides(make_backend):
    backend, mine = make_backend(), MostRecent(3)
    backend.evictor = mine
    assert backend.evictor is mine
    put(backend, "abcde")
    assert names_in(backend) == ["a", "b", "e"]
    assert [backend.contains(make_key(name)) for name in "abcde"] == [True, True, False, False, True]
    assert mine.calls == [("put", CHUNK_BYTES)] * 5
    backend.get(make_key("a"))
    backend.get(make_key("d"))  # a miss is no use
    backend.contains(make_key("b"))  # nor is a look
    assert mine.calls[5:] == [("get", "a")]
    put(backend, "f")
    assert names_in(backend) == ["b", "e", "f"]
    assert backend.get(make_key("b")).equal(make_chunk(seed=ord("b")))
    assert backend.num_faults == 0


def test_what_is_here_already_is_handed_over(make_backend):
    backend = make_backend()
    put(backend, "abcd")
    backend.get(make_key("a"))
    backend.evictor = MostRecent(4)
    assert names_in(backend) == ["b", "c", "d", "a"]
    put(backend, "e")
    assert names_in(backend) == ["b", "c", "d", "e"]


def test_the_documents_lru_works_when_it_is_assigned(make_backend):
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


def test_what_it_does_not_allow_is_dropped_and_counted(make_backend):
    backend = make_backend()
    backend.evictor = MostRecent(0)
    put(backend, "ab")
    assert names_in(backend) == []
    assert not backend.contains(make_key("a"))
    assert backend.num_faults == 2


def test_the_core_evicts_nothing_behind_its_back(make_backend):
    backend = make_backend(4)
    backend.evictor = DummyEvictor()
    put(backend, "abcdef")
    assert names_in(backend) == [*"abcd"]
    assert backend.num_faults == 2, "there was no room: said, and not made"


def test_short_chunks_count_as_full_ones_so_that_what_fits_the_limit_fits(make_backend):
    backend, mine = make_backend(4), MostRecent(4)
    backend.evictor = mine
    for number in range(40):
        backend.put(make_key(str(number)), make_chunk(1 + number % CHUNK, seed=number))
        assert backend.contains(make_key(str(number)))
        assert len(backend.dict) <= 4
    assert set(mine.calls) == {("put", CHUNK_BYTES)}
    assert backend.num_faults == 0


def test_an_evictor_that_raises_costs_the_chunk_and_no_more(make_backend):
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
    assert backend.num_faults == 3, "its two errors, and the chunk that was dropped"
    backend.evictor = MostRecent(3)
    put(backend, "b")
    assert names_in(backend) == ["a", "b"]


def test_the_engine_tells_it_of_a_prompt_s_tail_before_its_head(make_backend, monkeypatch):
    backend, mine = make_backend(16), MostRecent(16)
    backend.evictor = mine
    monkeypatch.setattr("lmcache.cache_engine.CreateStorageBackend", lambda *_: backend)
    engine = LMCacheEngine(make_config(), make_metadata())
    tokens, kv = make_tokens(4 * CHUNK), make_kv(4 * CHUNK)
    engine.store(tokens, kv)
    assert mine.calls == [("put", CHUNK_BYTES)] * 4
    hashes = [key.chunk_hash for key in engine._keys(tokens)]
    retrieved, _ = engine.retrieve(tokens)
    assert is_same(retrieved, kv)
    assert mine.calls[4:] == [("get", name) for name in reversed(hashes)]
    assert names_in(backend) == hashes[::-1]


def test_threads_never_disturb_its_dictionary(make_backend):
    backend, mine = make_backend(8), MostRecent(6)
    backend.evictor = mine

    def work(seed):
        for number in range(60):
            name = chr(ord("a") + (seed * 7 + number * 3) % 12)
            backend.put(make_key(name), make_chunk(seed=ord(name)))
            chunk = backend.get(make_key(name))
            assert chunk is None or chunk.equal(make_chunk(seed=ord(name)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(backend.dict) <= 6
    # (A put finds no room while readers still hold two of the victims: that is a drop, counted.)
    assert [key for key in map(make_key, "abcdefghijkl") if backend.contains(key)] == sorted(backend.dict)


def test_a_reader_that_missed_forgets_no_chunk_that_came_meanwhile(tmp_path, monkeypatch):
    """The evictor would never hear of its file again."""
    pool = LMCacheMemPoolMetadata(make_metadata().kv_shape, make_chunk().dtype, 8 * CHUNK_BYTES / 1024**3)
    backend = LMCLocalDiskBackend(make_config(str(tmp_path / "cache")), pool, "cpu")
    backend.evictor = MostRecent(4)
    load = backend._tier.load

    def load_and_put(*arguments):
        found = load(*arguments)
        put(backend, "a")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(backend._tier, "load", load_and_put)
        assert backend.get(make_key("a")) is None
    assert list(backend.dict) == [make_key("a")]
    assert names_in(backend) == ["a"]
    backend.close()


def test_files_of_an_earlier_process_make_room_first(tmp_path):
    size = 4 * CHUNK_BYTES / 1024**3
    pool = LMCacheMemPoolMetadata(make_metadata().kv_shape, make_chunk().dtype, size)
    earlier = LMCLocalDiskBackend(make_config(str(tmp_path / "cache")), pool, "cpu")
    put(earlier, "abcd")
    earlier.close()
    backend = LMCLocalDiskBackend(make_config(str(tmp_path / "cache")), pool, "cpu")
    assert backend.get(make_key("a")) is not None  # known from now on
    backend.evictor = MostRecent(4)
    put(backend, "ef")
    assert names_in(backend) == ["a", "e", "f"]
    assert backend.num_faults == 0
    backend.close()
