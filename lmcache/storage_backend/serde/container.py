"""The container around every payload that the library writes to a remote store.

What stands in front of a payload says all that its reader needs, and is checked before anything is allocated.
Whose payload it is does not stand there: a container may be **bound** to a label (a key, say), and then its
checksum holds for a reader who names the same label only.

======  =====  ==================================================================
offset  bytes  field (little-endian)
======  =====  ==================================================================
0       8      magic "LMCserde"
8       2      version: 1, or 2 when the container is bound to a label
10      1      kind of the payload: 1 raw, 2 safetensors, 3 cachegen
11      1      dtype, index into DTYPES
12      1      number of dimensions, at most 8
13      3      zero
16      8      length of the payload
24      32     8 dimensions; zero beyond the number of dimensions
56      16     xxh3-128 of (bytes 0 to 55, xxh3-128 of the payload, the label)
72      8      the magic again
80             the payload
======  =====  ==================================================================

Bytes 0 to 55 describe a tensor by themselves: the disk backend keeps them behind each chunk.
"""

from __future__ import annotations

import ctypes
import enum
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from lmcache.tiers.header import Buffer, checksum
from lmcache.tiers.memory.kernel_pages import prefer_huge_pages

MAGIC = b"LMCserde"
_PLAIN, _BOUND = 1, 2  # versions
MAX_DIMENSIONS = 8

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
"""Dtypes of tensors that can be stored; the order is part of the format."""

_FIELDS = struct.Struct("<8sHBBB3xQ8I")
_ZEROS = slice(13, 16)
_CHECK_BYTES = 16
DESCRIPTION_BYTES = _FIELDS.size
"""Length of what a header says of its payload: 56."""
_END_MARK = DESCRIPTION_BYTES + _CHECK_BYTES
HEADER_BYTES = _END_MARK + len(MAGIC)
"""Length of a header: 80."""

# torch itself can't describe a tensor whose dimensions multiply to more than 2**63, not even an empty one.
_MAX_EXTENT = 1 << 62

_MIN_HUGE_BYTES = 4 << 20  # two huge pages: one of them is whole

_BYTES_OF_SIZE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_ADDRESS_OF_BYTES = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)


class ContainerError(ValueError):
    """The bytes are not a container, or not an undamaged one; the message says what is wrong."""


class Kind(enum.IntEnum):
    """What a payload is."""

    RAW = 1  # the elements, contiguous, in the order of the dimensions
    SAFETENSORS = 2  # a safetensors file with one tensor, "tensor_bytes"
    CACHEGEN = 3  # quantised and entropy-coded, see cachegen_basics


class Container(NamedTuple):
    """A container that was checked; ``payload`` is a view of the bytes that were parsed."""

    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload: memoryview


def pack(
    kind: Kind, dtype: torch.dtype, shape: Sequence[int], parts: Sequence[Buffer], label: bytes = b""
) -> bytes:
    """Return a container whose payload is ``parts`` one after another, bound to ``label`` if that is given.

    Raises ValueError for dtypes and shapes that the format does not hold.
    """
    payload_bytes = sum(len(part) for part in parts)
    fields = describe(dtype, shape, payload_bytes, kind, label)
    blob, memory = _new_bytes(HEADER_BYTES + payload_bytes)
    np.concatenate([np.frombuffer(part, np.uint8) for part in (bytes(HEADER_BYTES), *parts)], out=memory)
    header = fields + _check(fields, memory.data[HEADER_BYTES:], label) + MAGIC
    np.copyto(memory[:HEADER_BYTES], np.frombuffer(header, np.uint8))
    return blob


def describe(
    dtype: torch.dtype, shape: Sequence[int], payload_bytes: int, kind: Kind = Kind.RAW, label: bytes = b""
) -> bytes:
    """Return what a header says of its payload, ``DESCRIPTION_BYTES`` of it: all but checksum and end mark.

    Raises ValueError for dtypes and shapes that the format does not hold.
    """
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 1 << 32:
        raise ValueError(f"a tensor of {dtype} and shape {tuple(shape)} can't be stored")
    dims = (*shape, *[0] * (MAX_DIMENSIONS - len(shape)))
    what = (MAGIC, _version(label), kind, DTYPES.index(dtype), len(shape), payload_bytes)
    return _FIELDS.pack(*what, *dims)


def described(fields: Buffer) -> tuple[Kind, torch.dtype, tuple[int, ...]]:
    """Read what ``describe`` returned. Raises ContainerError."""
    if len(fields) != DESCRIPTION_BYTES:
        raise ContainerError(f"a description has {DESCRIPTION_BYTES} bytes, not {len(fields)}")
    magic, _, kind, dtype, num_dims, _, *dims = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise ContainerError("wrong magic: not a container, or a damaged one")
    if kind not in list(Kind) or dtype >= len(DTYPES) or num_dims > MAX_DIMENSIONS:
        raise ContainerError(f"kind {kind}, dtype {dtype} or {num_dims} dimensions are unknown")
    if any(dims[num_dims:]) or any(fields[_ZEROS]):
        raise ContainerError("bytes that should be zero are not")
    shape = tuple(dims[:num_dims])
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _MAX_EXTENT:
        raise ContainerError(f"shape {shape} is too large")
    return Kind(kind), DTYPES[dtype], shape


def _new_bytes(size: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """A bytes object that is not filled yet, and its memory, to fill it before anybody else sees it.

    The interpreter's C API allows this; all that Python itself offers, ``b"".join`` say, holds the GIL while
    it copies.
    """
    blob = _BYTES_OF_SIZE(None, size)
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(_ADDRESS_OF_BYTES(blob)))
    _prefer_huge_pages(memory)
    return blob, memory


def _prefer_huge_pages(memory: npt.NDArray[np.uint8]) -> None:
    # Page by page, the kernel's clearing of fresh memory takes four times as long as everything else.
    if memory.nbytes >= _MIN_HUGE_BYTES:
        prefer_huge_pages(memory)


def is_container(blob: Buffer) -> bool:
    """Was this meant to be a container? Legacy bytes were not.

    The magic stands at both ends of the header, so that damage to one of them, or a cut, does not turn a
    container into legacy bytes.
    """
    view = memoryview(blob)
    return MAGIC.startswith(bytes(view[: len(MAGIC)])) or bytes(view[_END_MARK:HEADER_BYTES]) == MAGIC


def parse(blob: Buffer, label: bytes = b"") -> Container:
    """Check a container and take it apart, without a copy. Raises ContainerError, also for one that is bound
    to another label, and for one that is not bound when ``label`` is given."""
    view = memoryview(blob)
    if len(view) < HEADER_BYTES:
        raise ContainerError(f"{len(view)} bytes are no container: its header has {HEADER_BYTES}")
    fields, payload = view[:DESCRIPTION_BYTES], view[HEADER_BYTES:]
    magic, version, _, _, _, payload_bytes, *_ = _FIELDS.unpack(fields)
    if magic != MAGIC or view[_END_MARK:HEADER_BYTES] != MAGIC:
        raise ContainerError("wrong magic: not a container, or a damaged one")
    if version != _version(label):
        raise ContainerError(f"container of version {version}, not {_version(label)}")
    if payload_bytes != len(payload):
        raise ContainerError(f"payload has {len(payload)} bytes, not {payload_bytes}")
    if view[DESCRIPTION_BYTES:_END_MARK] != _check(fields, payload, label):
        raise ContainerError("checksum does not fit: damaged, or the value of another key")
    return Container(*described(fields), payload)


def _version(label: bytes) -> int:
    return _BOUND if label else _PLAIN


def _check(fields: Buffer, payload: Buffer, label: bytes) -> bytes:
    return xxhash.xxh3_128(bytes(fields) + checksum(payload) + label).digest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on any device as contiguous bytes; a view where that is possible."""
    return _memory_of(tensor.detach().to("cpu").contiguous()).data


def tensor_from_bytes(payload: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Copy bytes into a new tensor on the CPU. Raises ContainerError when their number does not fit."""
    if math.prod(shape) * dtype.itemsize != len(payload):
        raise ContainerError(f"{len(payload)} bytes are no {dtype} tensor of shape {tuple(shape)}")
    tensor = empty_tensor(dtype, shape)
    np.copyto(_memory_of(tensor), np.frombuffer(payload, np.uint8))
    return tensor


def empty_tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor on the CPU with undefined elements."""
    tensor = torch.empty(shape, dtype=dtype)
    _prefer_huge_pages(_memory_of(tensor))
    return tensor


def _memory_of(contiguous: torch.Tensor) -> npt.NDArray[np.uint8]:
    return contiguous.reshape(-1).view(torch.uint8).numpy()
