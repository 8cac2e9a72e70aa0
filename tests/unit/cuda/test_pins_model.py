"""Pinned memory: exactly the ready extents are pinned, while memory becomes ready and unready."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.cuda import pins as pins_module
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.cuda.pins import PAGE_BYTES, Pins

EXTENT = 2 * PAGE_BYTES
ADDRESS = 100 * PAGE_BYTES


class Registrations:
    """A CUDA context that refuses some extents and knows which memory may be touched."""

    def __init__(self, refused):
        self.refused, self.registered, self.ready = refused, {}, 0
        self.lock = threading.Lock()
        self.errors = []
        self.seconds = 0.0  # time that registrations took
        self.driver = SimpleNamespace(allow_calls_during_captures=lambda: None)

    def call(self, function, start, num_bytes=0, flags=0):
        with self.lock:
            if function == "cuMemHostUnregister":
                if self.registered.pop(start, None) is None:
                    self.errors.append(f"{start} was not registered")
                return
            self.seconds += num_bytes / PAGE_BYTES
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
def test_exactly_the_ready_extents_are_pinned(shift, num_pages, steps, waits, refused):
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
        with context.lock:  # no memory beyond ``step`` is registered after the call
            assert all(end <= ADDRESS + shift + step for end in context.registered.values())
        context.ready = ADDRESS + shift + step
        if is_awaited:
            assert pins.wait(60)
            expected = {
                start: end
                for start, end in itertools.pairwise(edges)
                if end <= context.ready and (shift or (start - ADDRESS) // EXTENT not in refused)
            }
            assert context.registered == expected
            assert pins.pinned_bytes == sum(end - start for start, end in expected.items())
            pages = np.arange(ADDRESS - PAGE_BYTES, ADDRESS + num_bytes + 2 * PAGE_BYTES, PAGE_BYTES)
            is_covered = [any(s <= page < e for s, e in expected.items()) for page in pages.tolist()]
            assert pins.covers(pages.astype(np.uint64)).tolist() == is_covered
    pins.close()
    assert not context.registered
    assert not context.errors
    assert pins.pinned_bytes == 0


def test_callback_reports_the_first_error_and_the_pinned_bytes():
    context, statuses, changed = Registrations({0, 2}), [], threading.Condition()

    def on_change():
        with changed:
            statuses.append(pins.status)
            changed.notify_all()

    def wait_for_status(status):
        with changed:
            return changed.wait_for(lambda: statuses and statuses[-1] == status, 60)

    context.ready = ADDRESS + 4 * EXTENT
    pins = Pins(context, ADDRESS, 4 * EXTENT, EXTENT, on_change)
    pins.set_ready(4 * EXTENT)
    error = str(CudaError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY"))
    assert wait_for_status(PinStatus(2 * EXTENT, 2, error))
    pins.set_ready(EXTENT)
    assert wait_for_status(PinStatus(0, 2, error))
    pins.close()


def paced_pins(monkeypatch, context, num_extents, **options):
    """Pins whose clock is that of the context, and their pauses, which take no time."""
    pauses = []
    monkeypatch.setattr(pins_module, "time", SimpleNamespace(monotonic=lambda: context.seconds))
    context.ready = ADDRESS + num_extents * EXTENT
    pins = Pins(context, ADDRESS, num_extents * EXTENT, EXTENT, **options)
    monkeypatch.setattr(pins, "_pause", pauses.append)
    pins.set_ready(num_extents * EXTENT)
    assert pins.wait(60)
    pins.close()
    return pauses


@pytest.mark.parametrize("num_extents", [1, 5, 4096])
def test_registrations_take_at_most_a_quarter_of_the_time(monkeypatch, num_extents):
    """4,096 extents are an arena of 64 GiB."""
    context = Registrations({2})
    pauses = paced_pins(monkeypatch, context, num_extents, pause_ratio=3.0)
    assert len(pauses) == num_extents
    assert context.seconds == EXTENT / PAGE_BYTES * num_extents
    assert context.seconds == (context.seconds + sum(pauses)) / 4
    assert not context.errors


def test_pins_without_pauses_register_at_full_speed(monkeypatch):
    assert not any(paced_pins(monkeypatch, Registrations(set()), 5))


def test_a_pause_ends_when_the_pins_close():
    context = Registrations(set())
    context.ready = ADDRESS + 3 * EXTENT
    has_paused = threading.Event()
    pins = Pins(context, ADDRESS, 3 * EXTENT, EXTENT, has_paused.set, pause_ratio=1e9, reports_progress=True)
    pins.set_ready(3 * EXTENT)
    assert has_paused.wait(60)
    assert pins.covers(np.array([ADDRESS, ADDRESS + EXTENT], np.uint64)).tolist() == [True, False]
    pins.close()
    assert not context.registered


def test_progress_is_reported_after_every_registration(monkeypatch):
    context, reports = Registrations({1}), []
    paced_pins(
        monkeypatch, context, 4, on_change=lambda: reports.append(context.seconds), reports_progress=True
    )
    assert len(reports) == 4
