"""Streams, events, and copies that are late."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lmcache.cuda.copies import CopyBatch
from lmcache.cuda.driver import Event, Stream
from testing import cuda_memory
from testing.cuda_memory import gate, pinned

pytestmark = pytest.mark.gpu

SIZE = 1 << 20


def batch(to, from_, size):
    return CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size)))


@pytest.fixture
def memory(context):
    address = cuda_memory.allocate(context, b"\1" * SIZE)
    yield address
    context.call("cuMemFree", address)


@pytest.fixture
def host(context):
    with pinned(context, SIZE) as array:
        yield array


def test_a_copy_happens_when_its_turn_comes(context, stream, memory, host):
    event = Event(context)
    with gate(context) as held:
        held.hold(stream)
        batch(host.ctypes.data, memory, SIZE).submit(stream)
        event.record(stream)
        assert not event.is_done()
        assert not host.any()
        held.open()
        event.synchronize()
        assert event.is_done()
        assert (host == 1).all()
    event.close()


def test_who_waits_lets_other_threads_run(context, stream):
    with gate(context) as held:
        held.hold(stream)
        waiter = threading.Thread(target=stream.synchronize)
        waiter.start()
        held.open()  # never reached if the wait held the GIL
        waiter.join(60)
        assert not waiter.is_alive()


def test_a_stream_waits_for_an_event_of_another(context, stream, memory, host):
    """As a store waits for the forward: the other stream is used by its raw handle alone."""
    engine, fence = Stream(context), Event(context)
    with gate(context) as held:
        held.hold(engine)
        raw = Stream(context, int(engine.raw))
        context.call("cuMemsetD8Async", memory, 7, SIZE, raw.raw)
        fence.record(raw)
        context.call("cuMemsetD8Async", memory + SIZE // 2, 9, SIZE // 2, raw.raw)  # may come before the copy
        stream.wait(fence)
        batch(host.ctypes.data, memory, SIZE).submit(stream)
        raw.close()
        assert not host.any()
        held.open()
        stream.synchronize()
        assert (host[: SIZE // 2] == 7).all()
        assert set(host[SIZE // 2 :].tolist()) <= {7, 9}
    engine.synchronize()
    engine.close()
    fence.close()


def test_an_event_stands_for_the_last_record(context, stream):
    event = Event(context)
    assert event.is_done()  # never recorded: nothing to wait for
    event.record(stream)
    event.synchronize()
    with gate(context) as held:
        held.hold(stream)
        event.record(stream)
        assert not event.is_done()
    event.synchronize()
    event.close()


def test_what_is_closed_twice_is_closed_once(context):
    stream, event = Stream(context), Event(context)
    for thing in (event, event, stream, stream):
        thing.close()


def test_work_of_a_closed_stream_is_done(context, memory, host):
    stream, event = Stream(context), Event(context)
    with gate(context) as held:
        held.hold(stream)
        batch(host.ctypes.data, memory, SIZE).submit(stream)
        event.record(stream)
        stream.close()
        held.open()
        event.synchronize()
    assert (host == 1).all()
    event.close()


def test_calls_come_from_any_thread(context, memory, host):
    errors = []

    def copy(part):
        stream = Stream(context)
        try:
            batch(host.ctypes.data + part * 4096, memory, 4096).submit(stream)
            stream.synchronize()
        except Exception as error:
            errors.append(error)
        stream.close()

    threads = [threading.Thread(target=copy, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert (host[: 8 * 4096] == 1).all()
    assert not host[8 * 4096 :].any()
