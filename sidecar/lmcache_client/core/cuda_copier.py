"""Copies between KV in device memory and a slot of the arena, made by the engine through the CUDA driver.

A row is one batch of copies, which is one call of the driver for all its pages. If the engine stores all
layers of a block together, each block is one piece of the batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmcache_client.core.copier import (
    STAGING_GROUP,
    Bytes,
    CpuCopier,
    EngineCopier,
    Fence,
    Places,
    RowLoad,
    allowed_cores,
)
from lmcache_client.core.layout import Layout
from lmcache_client.cuda import ipc
from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import Device, GpuContext, GpuEvent, GpuStream
from lmcache_client.cuda.errors import CudaError, CudaUnavailableError
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.cuda.pins import Pins
from lmcache_client.rpc.hello import Allocation, GroupPages, LayerPages, TransferOffer
from lmcache_store.common.nontemporal import Words

_LOAD_THREADS = 2
"""Two threads keep the bus busy: while one waits for its row, the other creates the next batch."""

_PIN_EXTENT_BYTES = 16 << 20
"""Bytes of one registration. Kernel launches of the engine may wait for it, 1 to 2 ms as expected."""

_PIN_PAUSE_RATIO = 3.0
"""Pause after a registration, as a multiple of its time: launches may wait in a quarter of the time at most.
An arena of 64 GiB is then pinned within about half a minute. Not yet verified on a GPU."""


class CudaCopier(EngineCopier):
    """Copies KV in device memory. Copies wait for a fence in the stream that the engine computes on."""

    def __init__(self, layouts: Mapping[int, Layout], device: Device) -> None:
        """Raises CudaError."""
        super().__init__(layouts, _LOAD_THREADS)
        self._layouts = layouts
        self._places = {group: Places(layout) for group, layout in layouts.items()}
        self._uuid = device.uuid
        self._context = device.primary_context()
        self._compute_stream = _torch_stream(next(iter(layouts.values())).pages[0].device)
        self._load_stream, self._store_stream = GpuStream(self._context), GpuStream(self._context)
        self.pins: Pins | None = None
        """Pinned memory of the arena's mapping that was prepared last."""
        self._mapping: Callable[[], object]
        self._mappings: list[tuple[Any, Pins]] = []  # (finalizer, pins); the present mapping is the last
        self._report_pins: Callable[[PinStatus], None] = lambda _: None
        # The finalizers refer to the pins. The pins must not refer to the copier: the copier refers to the
        # client, whose session keeps alive the mapping that the finalizers wait for.
        pins_changed = weakref.WeakMethod(self._pins_changed)

        def on_pins_changed() -> None:
            if (report := pins_changed()) is not None:
                report()

        self._on_pins_changed = on_pins_changed

    def fence(self) -> Fence:
        """Record an event on the stream that the engine computes on."""
        return _Fence(self._context, self._compute_stream())

    def wait(self, fence: Fence) -> None:
        """See ``EngineCopier``. Sleeps without holding the GIL. Raises CudaError."""
        fence.event.synchronize()

    def load(self, rows: Sequence[RowLoad], fence: Fence) -> None:
        """See ``EngineCopier``. Kernels before the fence may still read the blocks' old content."""
        for group, slot, first_block, blocks in rows:
            in_slot, in_kv, sizes = self._places[group].of(slot, first_block, blocks)
            self._copy(self._load_stream, in_kv, in_slot, sizes, fence, is_stable=True)

    def store(self, group: int, slot: Bytes, blocks: Sequence[int], fence: Fence) -> None:
        """See ``EngineCopier``."""
        in_slot, in_kv, sizes = self._places[group].of(slot, 0, blocks)
        self._copy(self._store_stream, in_slot, in_kv, sizes, fence, is_stable=False)

    def close(self) -> None:
        """See ``EngineCopier``."""
        super().close()
        for unpin, pins in self._mappings:
            _close(unpin, pins)
        for stream in (self._load_stream, self._store_stream):
            stream.close()
        self._context.close()

    def _copy(
        self, stream: GpuStream, to: Words, from_: Words, sizes: Words, fence: Fence, *, is_stable: bool
    ) -> None:
        pins = self.pins
        batch = CopyBatch(to, from_, sizes, pins.edges if pins is not None else None)
        in_arena = batch.to if stream is self._store_stream else batch.from_
        with pins.in_use() if pins is not None else contextlib.nullcontext():
            is_pinned = pins is not None and bool(pins.covers(in_arena).all())
            try:
                if not is_pinned:  # its copies would wait inside the driver, perhaps with a lock
                    fence.event.synchronize()
                stream.wait(fence.event)
                batch.submit(stream, is_source_stable=is_stable, is_pinned=is_pinned)
            finally:  # even a failed copy has ended only when the stream has no piece of it queued
                stream.synchronize()

    def prepare(self, slots: Bytes, ready_rows: int, is_alone: bool = False) -> None:
        """See ``EngineCopier``. Registers the ready rows with the driver in the background.

        The rows of an older mapping stay registered until none of its copies runs, or nothing refers to it.
        """
        mapping, slot_bytes = slots.base, slots.shape[1]
        if self.pins is None or self._mapping() is not mapping:
            self.pins = Pins(
                self._context, slots.ctypes.data, slots.nbytes, _PIN_EXTENT_BYTES, self._on_pins_changed,
                pause_ratio=_PIN_PAUSE_RATIO,
            )  # fmt: skip
            unpin = weakref.finalize(mapping, self.pins.close)
            unpin.atexit = False  # at exit the driver is shut down before finalizers run
            self._mapping = weakref.ref(mapping)
            self._mappings.append((unpin, self.pins))
        self.pins.set_ready(ready_rows * slot_bytes)
        *older, present = self._mappings
        for _, pins in older if is_alone else ():
            pins.close()
        older = [
            (unpin, pins) for unpin, pins in older if pins.pinned_bytes or (unpin.alive and not is_alone)
        ]
        self._mappings = [*older, present]
        if is_alone and older:
            raise CudaError("cuMemHostUnregister", 0, "refused", ": an older mapping stays registered")

    def watch_pins(self, on_change: Callable[[PinStatus], None]) -> None:
        """See ``EngineCopier``."""
        self._report_pins = on_change
        self._pins_changed()

    def _pins_changed(self) -> None:
        self._report_pins(self.pins.status if self.pins is not None else PinStatus())

    def offer(self) -> TransferOffer:
        """Export each allocation of the KV once, or return the reason why it can't be shared."""
        allocations: dict[int, Allocation] = {}  # by address, in the order of the offer
        groups = []
        try:
            for group, layout in self._layouts.items():
                if group == STAGING_GROUP:
                    continue
                layers = []
                for pages in layout.pages:
                    if not ipc.is_exportable(self._context, pages.data_ptr()):
                        return TransferOffer(self._uuid, refusal=_NOT_EXPORTABLE)
                    exported = ipc.export(self._context, pages.data_ptr())
                    allocations.setdefault(exported.base, Allocation(exported.handle, exported.num_bytes))
                    number = list(allocations).index(exported.base)
                    layers.append(LayerPages(number, exported.offset, pages.shape[1], pages.stride(0)))
                groups.append(GroupPages(group, len(layout.pages[0]), layout.blocks_per_row, tuple(layers)))
        except CudaError as error:
            return TransferOffer(self._uuid, refusal=f"the KV can't be exported: {error}")
        return TransferOffer(self._uuid, tuple(allocations.values()), tuple(groups))


def _close(unpin: Any, pins: Pins) -> None:
    """Close the pins of a mapping, and wait for a thread that runs the finalizer: it needs the context.

    A live finalizer could close the same pins during this call, because a garbage collection may run it in
    this thread. It would then wait for a thread that needs the lock of this call.
    """
    unpin.detach()
    pins.close()


_NOT_EXPORTABLE = (
    "CUDA IPC can't share virtual memory, in which the KV lies: start the engine without sleep mode, "
    "--enable-cumem-allocator, and expandable_segments in PYTORCH_ALLOC_CONF"
)


class _Fence:
    """An event in the compute stream that is destroyed with its last reference."""

    def __init__(self, context: GpuContext, stream: int) -> None:
        self.event = GpuEvent(context)
        self.event.record(GpuStream(context, stream))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit the driver may already be shut down
            self.event.close()


def _torch_stream(device: torch.device) -> Callable[[], int]:
    """Return a function that returns torch's current stream, or the legacy stream 0 on the host."""
    if device.type != "cuda":
        return lambda: 0
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def make_copier(layouts: Mapping[int, Layout], num_threads: int | None = None) -> EngineCopier:
    """Create the copier for the memory in which the CUDA driver finds the KV.

    ``layouts``: by KV group; ``num_threads``: threads of a load in host memory, by default 2 if there is more
    than one core.

    On a GPU, the calling thread must not be one that captures CUDA graphs. Raises ValueError if no copier
    fits.
    """
    pages = next(iter(layouts.values())).pages[0]
    try:
        device = Device.of(pages.data_ptr())
    except CudaUnavailableError as error:
        if pages.device.type == "cuda":
            raise ValueError(f"the KV is on a GPU that can't be used: {error}") from error
        device = None
    if device is not None:
        device.driver.allow_calls_during_captures()
        return CudaCopier(layouts, device)
    if pages.device.type == "cpu":
        return CpuCopier(layouts, num_threads or min(2, len(allowed_cores())))
    raise ValueError(f"KV on a {pages.device.type} device is not supported: only host memory and CUDA are")
