"""Whatever becomes ready and goes again: what is pinned is what is ready, and never what is not."""

from __future__ import annotations

import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from lmcache.cuda.errors import CudaError
from lmcache.cuda.pin_status import PinStatus
from lmcache.cuda.pins import PAGE_BYTES, Pins

EXTENT = 2 * PAGE_BYTES
ADDRESS = 100 * PAGE_BYTES


class Registrations:
    """A context that refuses some extents, and knows which memory may be touched."""

    def __init__(self, refused):
        self.refused, self.registered, self.ready = refused, {}, 0
        self.lock = threading.Lock()
        self.errors = []

    def call(self, function, start, num_bytes=0, flags=0):
        with self.lock:
            if function == "cuMemHostUnregister":
                if self.registered.pop(start, None) is None:
                    self.errors.append(f"{start} was not registered")
                return
            if start + num_bytes > self.ready:
                self.errors.append(f"{start} is not ready")
            if start in self.registered:
                self.errors.append(f"{start} is registered already")
            if (start - ADDRESS) // EXTENT in self.refused:
                raise CudaError(function, 2, "CUDA_ERROR_OUT_OF_MEMORY")
            self.registered[start] = start + num_bytes


@given(
    shift=st.sampled_from([0, 8, PAGE_BYTES - 8]),
    num_pages=st.integers(0, 13),
    steps=st.lists(st.integers(0, 14 * PAGE_BYTES), max_size=8),
    waits=st.lists(st.booleans(), min_size=8, max_size=8),
    refused=st.sets(st.integers(0, 6), max_size=2),
)
def test_what_is_pinned_is_what_is_ready(shift, num_pages, steps, waits, refused):
    num_bytes = num_pages * PAGE_BYTES
    context = Registrations(refused if not shift else set())
    pins = Pins(context, ADDRESS + shift, num_bytes, EXTENT)
    edges = pins.edges.tolist()
    for step, is_awaited in zip(steps, waits, strict=False):
        step = min(step, num_bytes)
        grows = ADDRESS + shift + step > context.ready
        if grows:
            context.ready = ADDRESS + shift + step
        pins.set_ready(step)
        with context.lock:  # nothing beyond is registered when this has returned
            assert all(end <= ADDRESS + shift + step for end in context.registered.values())
        context.ready = ADDRESS + shift + step
        if is_awaited:
            assert pins.wait(60)
            wanted = {
                start: end
                for start, end in itertools.pairwise(edges)
                if end <= context.ready and (shift or (start - ADDRESS) // EXTENT not in refused)
            }
            assert context.registered == wanted
            assert pins.pinned_bytes == sum(end - start for start, end in wanted.items())
    pins.close()
    assert not context.registered
    assert not context.errors
    assert pins.pinned_bytes == 0


def test_who_watches_learns_the_first_error_and_what_is_pinned_in_the_end():
    context, seen, changed = Registrations({0, 2}), [], threading.Condition()

    def on_change():
        with changed:
            seen.append(pins.status)
            changed.notify_all()

    def is_seen(status):
        with changed:
            return changed.wait_for(lambda: seen and seen[-1] == status, 60)

    context.ready = ADDRESS + 4 * EXTENT
    pins = Pins(context, ADDRESS, 4 * EXTENT, EXTENT, on_change)
    pins.set_ready(4 * EXTENT)
    error = "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert is_seen(PinStatus(2 * EXTENT, 2, error))
    pins.set_ready(EXTENT)
    assert is_seen(PinStatus(0, 2, error))
    pins.close()
