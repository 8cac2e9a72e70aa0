"""Extents of memory that are pinned in the background."""

import threading

import pytest

from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pins import PAGE_BYTES, Pins
from testing.cuda_memory import pages

pytestmark = pytest.mark.gpu

EXTENT = 16 * PAGE_BYTES


def is_pinned(context, address):
    kinds = context.driver.bindings.CUpointer_attribute
    try:
        context.call("cuPointerGetAttribute", kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    except CudaError:
        return False
    return True


@pytest.fixture
def host():
    return pages(4 * EXTENT)


@pytest.fixture
def pins(context, host):
    pins = Pins(context, host.ctypes.data, host.nbytes, EXTENT)
    yield pins
    pins.close()


def pinned_extents(context, host):
    return [is_pinned(context, host.ctypes.data + n * EXTENT) for n in range(4)]


def test_exactly_the_ready_extents_are_pinned_until_the_end(context, pins, host):
    assert pins.edges.tolist() == [host.ctypes.data + n * EXTENT for n in range(5)]
    pins.set_ready(2 * EXTENT + 5)
    assert pins.wait(60)
    assert pinned_extents(context, host) == [True, True, False, False]
    pins.set_ready(host.nbytes)
    assert pins.wait(60)
    assert (pins.pinned_bytes, pins.failures) == (host.nbytes, 0)
    pins.set_ready(EXTENT + 1)
    assert pinned_extents(context, host) == [True, False, False, False]
    pins.close()
    assert not any(pinned_extents(context, host))


def test_partly_ready_extent_is_unpinned_between_copies(context, pins, host):
    pins.set_ready(host.nbytes)
    assert pins.wait(60)
    with pins.in_use():
        pins.set_ready(2 * EXTENT)  # no copy may use the memory beyond, so that this does not wait
        assert pinned_extents(context, host) == [True, True, False, False]
        shrinking = threading.Thread(target=pins.set_ready, args=(EXTENT + 1,))
        shrinking.start()
        assert pinned_extents(context, host)[1], "a copy may use the first part of this extent"
    shrinking.join(60)
    assert pinned_extents(context, host) == [True, False, False, False]
    with pins.in_use():
        pass


def test_pinning_thread_may_close(context, host, monkeypatch):
    """A finalizer runs on any thread."""
    pins = Pins(context, host.ctypes.data, host.nbytes, EXTENT)
    register, closed = pins._register, threading.Event()

    def close_and_register(number):
        if number > 1:
            pins.close()
            closed.set()
        return register(number)

    monkeypatch.setattr(pins, "_register", close_and_register)
    pins.set_ready(host.nbytes)
    assert closed.wait(60)
    pins.close()
    assert not any(pinned_extents(context, host))
    assert pins.pinned_bytes == 0


def test_memory_that_is_already_pinned_is_counted_as_a_failure(context, host):
    context.call("cuMemHostRegister", host.ctypes.data + EXTENT, PAGE_BYTES, 0)
    pins = Pins(context, host.ctypes.data, host.nbytes, EXTENT)
    pins.set_ready(host.nbytes)
    assert pins.wait(60)
    assert (pins.failures, pins.pinned_bytes) == (1, 3 * EXTENT)
    pins.close()
    context.call("cuMemHostUnregister", host.ctypes.data + EXTENT)  # the foreign registration still exists
    context.call("cuMemGetInfo")  # no error is sticky
