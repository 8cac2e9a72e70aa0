"""Batches of copies between memories of every kind."""

import numpy as np
import pytest

from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import Driver
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pins import Pins
from testing import cuda_memory, cuda_peers
from testing.cuda_memory import gate, pages, pinned

pytestmark = pytest.mark.gpu

PIECES, PIECE_BYTES = 512, 4096
SIZE = PIECES * PIECE_BYTES
RANDOM = np.random.default_rng(0)
DATA = RANDOM.integers(0, 256, (PIECES, PIECE_BYTES), np.uint8)
ORDER = RANDOM.permutation(PIECES)
OFFSETS = np.arange(PIECES, dtype=np.uint64) * np.uint64(PIECE_BYTES)
SIZES = np.full(PIECES, PIECE_BYTES, np.uint64)


@pytest.fixture
def memory(context):
    address = cuda_memory.allocate(context, DATA.tobytes())
    yield np.uint64(address)
    context.call("cuMemFree", address)


def addresses(array):
    return np.uint64(array.ctypes.data) + OFFSETS


def copy_both_ways(context, stream, memory, host, edges=None, *, is_pinned=True):
    """Gather the pieces into ``host`` and scatter them back in another order."""
    CopyBatch(addresses(host), memory + OFFSETS[ORDER], SIZES, edges).submit(stream, is_pinned=is_pinned)
    stream.synchronize()
    np.testing.assert_array_equal(host.reshape(DATA.shape), DATA[ORDER])
    back = CopyBatch(memory + OFFSETS, addresses(host), SIZES, edges)
    back.submit(stream, is_source_stable=True, is_pinned=is_pinned)
    stream.synchronize()
    assert cuda_memory.content(context, int(memory), SIZE) == DATA[ORDER].tobytes()


def test_pinned_memory_is_copied_both_ways(context, stream, memory):
    with pinned(context, SIZE) as host:
        copy_both_ways(context, stream, memory, host)


def test_pageable_memory_is_copied_both_ways(context, stream, memory):
    copy_both_ways(context, stream, memory, pages(SIZE), is_pinned=False)


def test_memory_is_copied_within_the_device(context, stream, memory):
    target = int(context.call("cuMemAlloc", SIZE))
    CopyBatch(np.uint64(target) + OFFSETS, memory + OFFSETS[ORDER], SIZES).submit(stream)
    stream.synchronize()
    assert cuda_memory.content(context, target, SIZE) == DATA[ORDER].tobytes()
    context.call("cuMemFree", target)


def test_pieces_may_cross_the_edges_of_registrations(context, stream, memory):
    """Two of three parts of the memory are registered. No part ends with a piece."""
    host = pages(SIZE + PIECE_BYTES)
    pins = Pins(context, host.ctypes.data + 1000, SIZE, extent_bytes=171 * 4096)
    pins.set_ready(2 * 171 * 4096 + 5000)
    assert pins.wait(60)
    assert pins.pinned_bytes == 2 * 171 * 4096
    copy_both_ways(context, stream, memory, host[2000 : 2000 + SIZE], pins.edges, is_pinned=False)
    pins.close()


def test_empty_batch_does_not_call_the_driver(stream, monkeypatch):
    monkeypatch.setattr(Driver, "function", lambda *_: pytest.fail("the driver is called"))
    empty = np.zeros(0, np.uint64)
    CopyBatch(empty, empty, empty, empty).submit(stream)


def test_empty_piece_is_refused(context, stream, memory):
    sizes = SIZES.copy()
    sizes[3] = 0
    with pinned(context, SIZE) as host, pytest.raises(CudaError, match="INVALID_VALUE") as error:
        CopyBatch(addresses(host), memory + OFFSETS[ORDER], sizes).submit(stream)
    assert not error.value.is_sticky
    stream.synchronize()


def test_driver_without_batched_copies_copies_piece_by_piece(context, stream, memory, monkeypatch):
    find, names = Driver.function.__wrapped__, []

    def function(self, name, version, *types):
        names.append(name)
        return None if name == "cuMemcpyBatchAsync" else find(self, name, version, *types)

    monkeypatch.setattr(Driver, "function", function)
    with pinned(context, SIZE) as host:
        copy_both_ways(context, stream, memory, host)
    assert "cuMemcpyAsync" in names


def test_copy_of_freed_memory_breaks_the_context(simulated):
    """A proof that all tests on the simulated driver notice memory that is freed or closed too early."""
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        assert peer.call(copy_freed_memory) == (700, True)


def copy_freed_memory(state):
    """Free memory before its copy begins. Returns the code of the error, and whether it is sticky."""
    context, stream = state["context"], state["stream"]
    address, host = cuda_memory.allocate(context, bytes(SIZE)), pages(SIZE)
    context.call("cuMemHostRegister", host.ctypes.data, SIZE, 0)
    try:
        with gate(context) as held:
            held.hold(stream)
            CopyBatch(*np.array([[host.ctypes.data], [address], [SIZE]], np.uint64)).submit(stream)
            context.call("cuMemFree", address)
        stream.synchronize()
    except CudaError as error:
        return error.code, error.is_sticky
