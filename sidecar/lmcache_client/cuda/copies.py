"""Batches of copies: one call of the driver copies many pieces of memory, without a Python loop."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lmcache_client.cuda.driver import Driver, GpuStream
from lmcache_store.common.nontemporal import Words

BATCHES_SINCE = 12080
"""First CUDA version with ``cuMemcpyBatchAsync``. This module uses the signature of this version, whose last
argument but one returns the number of the failed piece. Later drivers still support it."""

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t

_BATCH = (*[_POINTER] * 3, _SIZE, *[_POINTER] * 2, _SIZE, *[_POINTER] * 2)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of reads of the source, location hints for both sides, and flags."""

    _fields_ = (("order", ctypes.c_int), ("from_", _Location), ("to", _Location), ("flags", ctypes.c_uint))


class CopyBatch:
    """Pieces to copy in any order: from device to host, from host to device, or within the device.

    Pieces that are adjacent on both sides are joined. Addresses are not checked here: the caller is
    responsible for them.
    """

    def __init__(self, to: Words, from_: Words, sizes: Words, edges: Words | None = None) -> None:
        """``to``, ``from_``: addresses ``[num_pieces]``; ``sizes``: bytes of each piece, more than 0;
        ``edges``: ascending addresses at which pieces are split, because a copy of pinned memory must lie in
        one registration (see ``Pins.edges``).

        Raises ValueError if the lengths differ.
        """
        if not len(to) == len(from_) == len(sizes):
            raise ValueError(f"{len(to)} targets, {len(from_)} sources and {len(sizes)} sizes: not equal")
        pieces = _joined(*(np.ascontiguousarray(words, np.uint64) for words in (to, from_, sizes)))
        if edges is not None and len(edges):
            to, from_, sizes = _cut(*pieces, edges)
            from_, to, sizes = _cut(from_, to, sizes, edges)
            pieces = to, from_, sizes
        self.to, self.from_, self.sizes = pieces

    def __len__(self) -> int:
        return len(self.sizes)

    def submit(self, stream: GpuStream, *, is_source_stable: bool = False, is_pinned: bool = True) -> None:
        """Queue the copies on ``stream``.

        Args:
            stream: the stream.
            is_source_stable: no queued work writes to the sources, which may then be read at once.
            is_pinned: all host memory of the copies is pinned. Otherwise each piece is copied by a call of
                its own, because CUDA documents no batches with other memory. Such a call may block until
                earlier work of the stream has ended.

        Raises:
            CudaError: some pieces may be queued nevertheless.
        """
        if not len(self):
            return
        driver = stream.context.driver
        handle = int(stream.raw)
        with stream.context:
            batch: Any = driver.function("cuMemcpyBatchAsync", BATCHES_SINCE, *_BATCH)
            if batch is None or not (is_pinned and stream.context.can_batch):
                self._submit_singly(driver, handle)
                return
            attributes = _Attributes(order=_IN_ANY_ORDER if is_source_stable else _IN_STREAM_ORDER)
            first, failed = _SIZE(0), _SIZE(0)
            code = batch(
                self.to.ctypes.data, self.from_.ctypes.data, self.sizes.ctypes.data, len(self),
                ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed), handle,
            )  # fmt: skip
            if code:
                detail = f", piece {failed.value} of {len(self)}" if failed.value < len(self) else ""
                raise driver.error("cuMemcpyBatchAsync", code, detail)

    def _submit_singly(self, driver: Driver, handle: int) -> None:
        """Queue one copy per piece."""
        copy: Any = driver.function("cuMemcpyAsync", 4000, ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER)
        for to, from_, size in zip(self.to.tolist(), self.from_.tolist(), self.sizes.tolist(), strict=True):
            if code := copy(to, from_, size, handle):
                raise driver.error("cuMemcpyAsync", code)


def _joined(to: Words, from_: Words, sizes: Words) -> tuple[Words, Words, Words]:
    """Join pieces that are adjacent on both sides."""
    is_new = np.ones(len(sizes), bool)
    is_new[1:] = (to[1:] != to[:-1] + sizes[:-1]) | (from_[1:] != from_[:-1] + sizes[:-1])
    if is_new.all():
        return to, from_, sizes
    (first,) = is_new.nonzero()
    return to[first], from_[first], np.add.reduceat(sizes, first)


def _cut(starts: Words, opposite: Words, sizes: Words, edges: Words) -> tuple[Words, Words, Words]:
    """Split pieces at ``edges`` of their first side."""
    ends = starts + sizes
    first = np.searchsorted(edges, starts, "right")
    cuts = np.searchsorted(edges, ends, "left") - first
    if not cuts.any():
        return starts, opposite, sizes
    piece = np.repeat(np.arange(len(sizes)), cuts + 1)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)  # within its piece
    edge = first[piece] + number
    begin: Words = np.where(number == 0, starts[piece], edges[edge - 1])
    end = np.where(number == cuts[piece], ends[piece], edges[np.minimum(edge, len(edges) - 1)])
    return begin, opposite[piece] + (begin - starts[piece]), end - begin
