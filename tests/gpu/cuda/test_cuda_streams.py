"""Streams, events, and delayed copies."""

import threading

import numpy as np
import pytest

from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import GpuContext, GpuEvent, GpuStream
from lmcache_client.cuda.errors import CudaError
from testing import cuda_memory
from testing.cuda_memory import gate, pinned

pytestmark = pytest.mark.gpu

SIZE = 1 << 20
NOT_READY = 600  # code of the driver


def batch(to, from_, size):
    return CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size)))


def is_done(context: GpuContext, event: GpuEvent) -> bool:
    """Has the work before the event ended?"""
    try:
        context.call("cuEventQuery", event.raw)
    except CudaError as error:
        if error.code != NOT_READY:
            raise
        return False
    return True


@pytest.fixture
def memory(context):
    address = cuda_memory.allocate(context, b"\1" * SIZE)
    yield address
    context.call("cuMemFree", address)


@pytest.fixture
def host(context):
    with pinned(context, SIZE) as array:
        yield array


def test_copy_runs_in_stream_order(context, stream, memory, host):
    event = GpuEvent(context)
    with gate(context) as closed_gate:
        closed_gate.hold(stream)
        batch(host.ctypes.data, memory, SIZE).submit(stream)
        event.record(stream)
        assert not is_done(context, event)
        assert not host.any()
        closed_gate.open()
        event.synchronize()
        assert is_done(context, event)
        assert (host == 1).all()
    event.close()


def test_waiting_thread_releases_the_gil(context, stream):
    with gate(context) as closed_gate:
        closed_gate.hold(stream)
        waiter = threading.Thread(target=stream.synchronize)
        waiter.start()
        closed_gate.open()  # not reached if the wait holds the GIL
        waiter.join(60)
        assert not waiter.is_alive()


def test_event_waits_for_its_latest_record(context, stream):
    event = GpuEvent(context)
    assert is_done(context, event)  # it was never recorded
    event.record(stream)
    event.synchronize()
    with gate(context) as closed_gate:
        closed_gate.hold(stream)
        event.record(stream)
        assert not is_done(context, event)
    event.synchronize()
    event.close()


def test_work_of_a_closed_stream_still_runs(context, memory, host):
    stream, event = GpuStream(context), GpuEvent(context)
    with gate(context) as closed_gate:
        closed_gate.hold(stream)
        batch(host.ctypes.data, memory, SIZE).submit(stream)
        event.record(stream)
        stream.close()
        closed_gate.open()
        event.synchronize()
    assert (host == 1).all()
    event.close()
