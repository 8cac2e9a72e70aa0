"""The container around every payload that the library writes to a remote store.

The header before the payload describes the payload completely, and is checked before any memory is allocated.
The header does not contain the key of the payload. Instead, a container may be **bound** to a label, such as
a key: its checksum is then correct only for a reader that gives the same label.

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

Bytes 0 to 55 alone describe a tensor. The disk backend writes them after each chunk.
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

from lmcache_store.tiers.header import Buffer, checksum
from lmcache_store.tiers.memory.kernel_pages import prefer_huge_pages

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
"""Dtypes of tensors that can be stored. Their order is part of the format."""

_FIELDS = struct.Struct("<8sHBBB3xQ8I")
_ZEROS = slice(13, 16)
_CHECK_BYTES = 16
DESCRIPTION_BYTES = _FIELDS.size
"""Bytes of the description in a header: 56."""
_END_MARK = DESCRIPTION_BYTES + _CHECK_BYTES
HEADER_BYTES = _END_MARK + len(MAGIC)
"""Bytes of a header: 80."""

# torch can't represent a tensor whose dimensions multiply to more than 2**63, not even an empty one.
_MAX_EXTENT = 1 << 62

_MIN_HUGE_BYTES = 4 << 20  # twice a huge page, so that at least one huge page is inside

_BYTES_OF_SIZE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_ADDRESS_OF_BYTES = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)


class ContainerError(ValueError):
    """Raised if bytes are not a container, or are damaged; the message gives the reason."""


class PayloadKind(enum.IntEnum):
    """Form of a payload."""

    RAW = 1  # the elements, contiguous, in the order of the dimensions
    SAFETENSORS = 2  # a safetensors file with one tensor, "tensor_bytes"
    CACHEGEN = 3  # quantised and entropy-coded, see cachegen_basics


class Container(NamedTuple):
    """A verified container. ``payload`` is a view of the parsed bytes."""

    kind: PayloadKind
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload: memoryview


def pack(
    kind: PayloadKind, dtype: torch.dtype, shape: Sequence[int], parts: Sequence[Buffer], label: bytes = b""
) -> bytes:
    """Return a container whose payload is the concatenation of ``parts``, bound to ``label`` if given.

    Raises ValueError for a dtype or shape that the format does not support.
    """
    payload_bytes = sum(len(part) for part in parts)
    fields = describe(dtype, shape, payload_bytes, kind, label)
    blob, memory = _new_bytes(HEADER_BYTES + payload_bytes)
    np.concatenate([np.frombuffer(part, np.uint8) for part in (bytes(HEADER_BYTES), *parts)], out=memory)
    header = fields + _check(fields, memory.data[HEADER_BYTES:], label) + MAGIC
    np.copyto(memory[:HEADER_BYTES], np.frombuffer(header, np.uint8))
    return blob


def describe(
    dtype: torch.dtype,
    shape: Sequence[int],
    payload_bytes: int,
    kind: PayloadKind = PayloadKind.RAW,
    label: bytes = b"",
) -> bytes:
    """Return what a header says of its payload, ``DESCRIPTION_BYTES`` of it: all but checksum and end mark.

    Raises ValueError for dtypes and shapes that the format does not hold.
    """
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or max(shape, default=0) >= 1 << 32:
        raise ValueError(f"a tensor of {dtype} and shape {tuple(shape)} can't be stored")
    dims = (*shape, *[0] * (MAX_DIMENSIONS - len(shape)))
    what = (MAGIC, _version(label), kind, DTYPES.index(dtype), len(shape), payload_bytes)
    return _FIELDS.pack(*what, *dims)


def described(fields: Buffer) -> tuple[PayloadKind, torch.dtype, tuple[int, ...]]:
    """Parse the bytes that ``describe`` returns. Raises ContainerError."""
    if len(fields) != DESCRIPTION_BYTES:
        raise ContainerError(f"a description must have {DESCRIPTION_BYTES} bytes, not {len(fields)}")
    magic, _, kind, dtype, num_dims, _, *dims = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise ContainerError("wrong magic: not a container, or a damaged one")
    if kind not in list(PayloadKind) or dtype >= len(DTYPES) or num_dims > MAX_DIMENSIONS:
        raise ContainerError(f"kind {kind}, dtype {dtype} or {num_dims} dimensions are unknown")
    if any(dims[num_dims:]) or any(fields[_ZEROS]):
        raise ContainerError("reserved bytes are not zero")
    shape = tuple(dims[:num_dims])
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _MAX_EXTENT:
        raise ContainerError(f"shape {shape} is too large")
    return PayloadKind(kind), DTYPES[dtype], shape


def _new_bytes(size: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Return an uninitialized bytes object and its memory, which the caller fills before anyone else uses it.

    The interpreter's C API allows this. Python's own functions, such as ``b"".join``, hold the GIL during the
    copy.
    """
    blob = _BYTES_OF_SIZE(None, size)
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(_ADDRESS_OF_BYTES(blob)))
    _prefer_huge_pages(memory)
    return blob, memory


def _prefer_huge_pages(memory: npt.NDArray[np.uint8]) -> None:
    # With small pages, the kernel takes four times as long to clear fresh memory as everything else takes.
    if memory.nbytes >= _MIN_HUGE_BYTES:
        prefer_huge_pages(memory)


def parse(blob: Buffer, label: bytes = b"") -> Container:
    """Verify and parse a container, without a copy.

    Raises ContainerError, also if the container is bound to another label, or to none if ``label`` is given.
    """
    view = memoryview(blob)
    if len(view) < HEADER_BYTES:
        raise ContainerError(f"{len(view)} bytes are not a container: its header alone has {HEADER_BYTES}")
    fields, payload = view[:DESCRIPTION_BYTES], view[HEADER_BYTES:]
    magic, version, _, _, _, payload_bytes, *_ = _FIELDS.unpack(fields)
    if magic != MAGIC or view[_END_MARK:HEADER_BYTES] != MAGIC:
        raise ContainerError("wrong magic: not a container, or a damaged one")
    if version != _version(label):
        raise ContainerError(f"container of version {version}, not {_version(label)}")
    if payload_bytes != len(payload):
        raise ContainerError(f"payload has {len(payload)} bytes, not {payload_bytes}")
    if view[DESCRIPTION_BYTES:_END_MARK] != _check(fields, payload, label):
        raise ContainerError("the checksum is wrong: the value is damaged, or belongs to another key")
    return Container(*described(fields), payload)


def _version(label: bytes) -> int:
    return _BOUND if label else _PLAIN


def _check(fields: Buffer, payload: Buffer, label: bytes) -> bytes:
    return xxhash.xxh3_128(bytes(fields) + checksum(payload) + label).digest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor on any device as contiguous bytes, without a copy if possible."""
    return _memory_of(tensor.detach().to("cpu").contiguous()).data


def tensor_from_bytes(payload: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Copy bytes to a new tensor on the CPU. Raises ContainerError if their number does not fit the shape."""
    if math.prod(shape) * dtype.itemsize != len(payload):
        raise ContainerError(f"{len(payload)} bytes do not fit a {dtype} tensor of shape {tuple(shape)}")
    tensor = empty_tensor(dtype, shape)
    np.copyto(_memory_of(tensor), np.frombuffer(payload, np.uint8))
    return tensor


def empty_tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a new, uninitialized tensor on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    _prefer_huge_pages(_memory_of(tensor))
    return tensor


def _memory_of(contiguous: torch.Tensor) -> npt.NDArray[np.uint8]:
    return contiguous.reshape(-1).view(torch.uint8).numpy()
