"""Many pieces of memory copied by one call of the driver, on a stream, with no Python per piece."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache.cuda.driver import Driver, Stream

Words = npt.NDArray[np.uint64]

BATCHES_SINCE = 12080
"""The driver that has ``cuMemcpyBatchAsync``, and the form of it that is used: its last argument but one says
which piece is wrong. Later drivers keep it.
"""

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t

_BATCH = (*[_POINTER] * 3, _SIZE, *[_POINTER] * 2, _SIZE, *[_POINTER] * 2)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how the source may be read, where memory without a place should be, flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("from_", _Location),
        ("to", _Location),
        ("flags", ctypes.c_uint),
    )


class CopyBatch:
    """Pieces to be copied, in no order among each other: device to host, host to device, or on the device.

    Pieces that continue one another on both sides are joined. Addresses are not checked here: whoever makes a
    batch answers for them.
    """

    def __init__(self, to: Words, from_: Words, sizes: Words, edges: Words | None = None) -> None:
        """``to``, ``from_``: addresses ``[num_pieces]``; ``sizes``: bytes of each, none 0.

        ``edges``: addresses, ascending, at which pieces are cut: a copy of pinned memory must lie in one
        registration (see ``Pins.edges``).
        """
        if not len(to) == len(from_) == len(sizes):
            raise ValueError(f"{len(to)} targets, {len(from_)} sources and {len(sizes)} sizes are no pieces")
        pieces = _joined(*(np.ascontiguousarray(words, np.uint64) for words in (to, from_, sizes)))
        if edges is not None and len(edges):
            to, from_, sizes = _cut(*pieces, edges)
            from_, to, sizes = _cut(from_, to, sizes, edges)
            pieces = to, from_, sizes
        self.to, self.from_, self.sizes = pieces

    def __len__(self) -> int:
        return len(self.sizes)

    def submit(self, stream: Stream, *, is_source_stable: bool = False) -> None:
        """Queue the copies on ``stream``. Raises CudaError; some pieces may have been queued even so.

        ``is_source_stable``: nothing that is queued writes to the sources, so that they may be read at once.
        """
        if not len(self):
            return
        driver = stream.context.driver
        handle = int(stream.raw)
        with stream.context:
            batch: Any = driver.function("cuMemcpyBatchAsync", BATCHES_SINCE, *_BATCH)
            if batch is None:
                self._submit_singly(driver, handle)
                return
            attributes = _Attributes(order=_IN_ANY_ORDER if is_source_stable else _IN_STREAM_ORDER)
            first, wrong = _SIZE(0), _SIZE(0)
            code = batch(
                self.to.ctypes.data, self.from_.ctypes.data, self.sizes.ctypes.data, len(self),
                ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(wrong), handle,
            )  # fmt: skip
            if code:
                which = f", piece {wrong.value} of {len(self)}" if wrong.value < len(self) else ""
                raise driver.error("cuMemcpyBatchAsync", code, which)

    def _submit_singly(self, driver: Driver, handle: int) -> None:
        """For drivers before CUDA 12.8."""
        copy: Any = driver.function("cuMemcpyAsync", 4000, ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER)
        for to, from_, size in zip(self.to.tolist(), self.from_.tolist(), self.sizes.tolist(), strict=True):
            if code := copy(to, from_, size, handle):
                raise driver.error("cuMemcpyAsync", code)


def _joined(to: Words, from_: Words, sizes: Words) -> tuple[Words, Words, Words]:
    """Join what is adjacent on both sides."""
    is_new = np.ones(len(sizes), bool)
    is_new[1:] = (to[1:] != to[:-1] + sizes[:-1]) | (from_[1:] != from_[:-1] + sizes[:-1])
    if is_new.all():
        return to, from_, sizes
    (first,) = is_new.nonzero()
    return to[first], from_[first], np.add.reduceat(sizes, first)


def _cut(starts: Words, others: Words, sizes: Words, edges: Words) -> tuple[Words, Words, Words]:
    """Cut pieces at ``edges`` of their first side."""
    ends = starts + sizes
    first = np.searchsorted(edges, starts, "right")
    cuts = np.searchsorted(edges, ends, "left") - first
    if not cuts.any():
        return starts, others, sizes
    piece = np.repeat(np.arange(len(sizes)), cuts + 1)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)  # within its piece
    edge = first[piece] + number
    begin: Words = np.where(number == 0, starts[piece], edges[edge - 1])
    end = np.where(number == cuts[piece], ends[piece], edges[np.minimum(edge, len(edges) - 1)])
    return begin, others[piece] + (begin - starts[piece]), end - begin
