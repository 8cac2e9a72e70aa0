"""Memory pools and their arena."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.mem_pool import (
    KVObj,
    LocalCPUBufferPool,
    LocalCPUPool,
    LocalGPUPool,
    LocalPool,
    TorchArena,
)
from lmcache_store.tiers.memory.contracts import Geometry
from tests.harness.scope import examples

SHAPE = (2, 2, 64, 8, 16)  # a full chunk: 64 KiB of fp16, 16 slots of 4 KiB
CHUNK_BYTES = 2 * 2 * 64 * 8 * 16 * 2


def metadata(num_chunks=4, shape=SHAPE, dtype=torch.float16):
    return LMCacheMemPoolMetadata(shape, dtype, num_chunks * CHUNK_BYTES / 1024**3)


def chunk(num_tokens, layout="vllm", dtype=torch.float16):
    if layout == "vllm":
        return torch.randn(2, 2, num_tokens, 8, 16).to(dtype)
    return torch.randn(2, 2, 8, num_tokens, 16).to(dtype)


@pytest.fixture(params=[LocalPool, LocalCPUPool, LocalCPUBufferPool])
def pool(request):
    return request.param(metadata())


@pytest.mark.parametrize("layout", ["vllm", "huggingface"])
@pytest.mark.parametrize("num_tokens", [1, 17, 64])
def test_defect_21_allocates_the_shape_of_the_chunk_in_both_layouts(pool, layout, num_tokens):
    source = chunk(num_tokens, layout)
    kv_obj = pool.allocate(source)
    assert (kv_obj.data.shape, kv_obj.data.dtype) == (source.shape, source.dtype)
    assert kv_obj.data.is_contiguous()
    kv_obj.data.copy_(source)
    assert torch.equal(kv_obj.data, source)


def test_allocates_as_many_full_chunks_as_fit(pool):
    assert (pool.size_per_chunk, pool.max_chunk_num) == (CHUNK_BYTES, 4)
    objects = [pool.allocate(chunk(64)) for _ in range(4)]
    assert all(kv_obj.size == CHUNK_BYTES for kv_obj in objects)
    assert len({kv_obj.chunk_idx for kv_obj in objects}) == 4


def test_defect_15_partial_chunk_uses_only_its_slots(pool):
    objects = [pool.allocate(chunk(4)) for _ in range(4 * 16)]
    assert all(kv_obj.size == CHUNK_BYTES // 16 for kv_obj in objects)


def test_exhausted_pool_raises_or_returns_none():
    pool, buffers = LocalCPUPool(metadata(1)), LocalCPUBufferPool(metadata(1))
    pool.allocate(chunk(64)), buffers.allocate(chunk(64))
    with pytest.raises(Exception, match="Mempool allocation failed"):
        pool.allocate(chunk(1))
    assert buffers.allocate(chunk(1)) is None


def test_smallest_pool_holds_a_single_chunk():
    assert LocalCPUPool(metadata(0)).max_chunk_num == 1


def test_refuses_longer_chunks_and_other_dtypes(pool):
    with pytest.raises(AssertionError, match="more than a full chunk"):
        pool.allocate(chunk(65))
    with pytest.raises(TypeError, match=r"holds torch.float16, not torch.float32"):  # defect 5
        pool.allocate(chunk(64, dtype=torch.float32))


def test_refuses_to_free_unallocated_memory(pool):
    kv_obj = pool.allocate(chunk(64))
    pool.free(kv_obj)
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(kv_obj)
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(KVObj(99, 1, torch.empty(1)))


@given(st.lists(st.integers(1, 64), max_size=12), st.randoms())
@settings(max_examples=examples(25))
def test_any_mix_of_chunks_preserves_bytes(lengths, random):
    pool, allocated = LocalCPUBufferPool(metadata(3)), []
    for number, num_tokens in enumerate(lengths):
        kv_obj = pool.allocate(chunk(num_tokens))
        if kv_obj is not None:
            kv_obj.data.fill_(number)
            allocated.append((number, kv_obj))
        if allocated and random.random() < 0.4:
            number, kv_obj = allocated.pop(random.randrange(len(allocated)))
            assert (kv_obj.data == number).all()
            pool.free(kv_obj)
    assert all((kv_obj.data == number).all() for number, kv_obj in allocated)
    for _, kv_obj in allocated:
        pool.free(kv_obj)
    assert all(pool.allocate(chunk(64)) for _ in range(pool.max_chunk_num))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gpu_pool_without_a_gpu_uses_host_memory():
    kv_obj = LocalGPUPool(metadata()).allocate(chunk(64))
    assert kv_obj.data.device.type == "cpu"


def test_tiny_chunks_share_frames():
    arena = TorchArena.for_chunks(1000, 64 * 4096)
    assert (arena.geometry, arena.num_rows) == (Geometry(4096, 1), 64)


class FakeCudart:
    """A CUDA runtime that records registered memory and fails after ``limit`` registrations."""

    def __init__(self, limit=99):
        self.ranges, self.limit = {}, limit

    def cudaHostRegister(self, address, size, flags):
        if len(self.ranges) >= self.limit:
            return 2
        self.ranges[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.ranges[address]
        return 0


@pytest.fixture
def fake_cuda(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr("lmcache.storage_backend.mem_pool.torch_arena._PIN_BYTES", 1)
    return cudart


def test_host_memory_is_pinned_frame_by_frame_at_first_use(fake_cuda):
    arena = TorchArena.for_chunks(CHUNK_BYTES, 3 * CHUNK_BYTES)
    assert fake_cuda.ranges == {}
    second = arena.tensor(16, (8,), torch.uint8)
    assert fake_cuda.ranges == {second.data_ptr(): CHUNK_BYTES}
    arena.tensor(31, (8,), torch.uint8)
    assert len(fake_cuda.ranges) == 1
    arena.tensor(0, (8,), torch.uint8)
    assert len(fake_cuda.ranges) == 2
    del second
    arena.close()
    assert fake_cuda.ranges == {}


def test_unpinnable_memory_is_usable(fake_cuda, monkeypatch):
    warnings = []
    log = SimpleNamespace(warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr("lmcache.storage_backend.mem_pool.torch_arena.logger", log)
    fake_cuda.limit = 0
    arena = TorchArena.for_chunks(CHUNK_BYTES, CHUNK_BYTES)
    arena.tensor(0, (8,), torch.uint8).fill_(7)
    arena.tensor(0, (8,), torch.uint8)
    assert arena.tensor(0, (8,), torch.uint8).tolist() == [7] * 8
    assert len(warnings) == 1
    arena.close()
