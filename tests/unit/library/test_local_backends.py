"""Local backends: what memory and disk have in common."""

import pytest
import torch

from testing.child_process import wait_until
from tests.harness.library.kv_cache import make_chunk, make_key


@pytest.fixture
def backend(make_backend):
    return make_backend(64)


def test_get_returns_the_put_chunk(backend):
    for index, dtype in enumerate((torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int16)):
        chunk = make_chunk(7, seed=index).to(dtype)
        backend.put(make_key("a"), chunk)
        loaded = backend.get(make_key("a"))
        assert loaded.dtype == dtype
        assert torch.equal(loaded.view(torch.uint8), chunk.view(torch.uint8))
    assert backend.contains(make_key("a"))
    assert backend.get(make_key("b")) is None
    assert not backend.contains(make_key("b"))


def test_removed_chunk_is_a_miss(backend):
    backend.put(make_key("a"), make_chunk())
    backend.remove(make_key("a"))
    backend.remove(make_key("unknown"))
    assert not backend.contains(make_key("a"))
    assert backend.evictor.current_cache_size == 0


def test_defect_08_invalid_put_stops_neither_worker_nor_backend(backend):
    backend.put_nonblocking(make_key("invalid"), make_chunk().to("meta"))  # has no bytes to copy
    backend.put_nonblocking(make_key("good"), make_chunk())
    wait_until(lambda: backend.contains(make_key("good")))
    assert backend.get(make_key("invalid")) is None
    assert backend.num_faults == 1
    size = backend.evictor.current_cache_size
    assert make_chunk().nbytes <= size < 2 * make_chunk().nbytes, "slots of the invalid put are free again"


def test_limit_can_be_reduced(make_backend):
    backend, num_bytes = make_backend(8), make_chunk().nbytes
    backend.put(make_key("a"), make_chunk())
    wait_until(lambda: backend.evictor.current_cache_size > 0)  # a disk counts its old files first
    for name in "bc":
        backend.put(make_key(name), make_chunk())
    backend.evictor.MAX_CACHE_SIZE = 2.01 * num_bytes
    backend.put(make_key("d"), make_chunk())
    assert [key.chunk_hash for key in backend.dict] == ["c", "d"]
    backend.evictor.MAX_CACHE_SIZE = num_bytes - 1
    backend.put(make_key("too large"), make_chunk())
    assert [key.chunk_hash for key in backend.dict] == ["c", "d"]
    assert backend.num_faults == 1
