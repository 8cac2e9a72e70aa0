"""The "cachegen" codec: KV quantised per token, then entropy-coded.

One layer's K (or V) of one token is divided by its **scale**, its largest magnitude over ``bins / 2 - 1``,
and rounded: whole numbers from ``1 - bins / 2`` to ``bins / 2 - 1``. They are coded as their difference,
modulo ``bins``, from the **middle** of their channel (the rounded mean over the chunk's tokens), because
channels of K lie around very different values. Channel by channel, tokens in order, these symbols are
Huffman-coded by zlib (Z_HUFFMAN_ONLY: a new table every 16 Ki symbols, so that tables follow layers and
heads), a stream per layer.

Why zlib: entropy coding is the one step that torch and NumPy have no operation for. It is in every Python,
releases the GIL, costs ~5 ns a symbol, and loses 1 to 3 % against the entropy of its tables' symbols.

The payload behind the container's header, little-endian; shape [L, 2, T, H, D] or [L, 2, H, T, D]:

========================  =====================================================
bytes                     field
========================  =====================================================
1                         axis of the tokens: 2 ("vllm") or 3 ("huggingface")
1                         bins / 2 - 1
2                         zero
4 x L                     lengths of the streams
4 x L x 2 x T             scales, float32
...                       streams: [2, H, D, 1 + T] symbols, the first of each
                          channel is its middle
========================  =====================================================
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmcache.storage_backend.serde.container import (
    Container,
    ContainerError,
    Kind,
    empty_tensor,
    pack,
    parse,
    tensor_bytes,
    tensor_from_bytes,
)
from lmcache.tiers.header import Buffer

_FIELDS = struct.Struct("<BBxx")
_LENGTH = np.dtype("<u4")
_SCALE = torch.float32
_SMALLEST_SCALE = torch.finfo(_SCALE).smallest_normal  # smaller ones have too few bits
# Keeps top * scale at or below the largest magnitude, so that it does not overflow where that did not.
_SHRINK = 1 - 2**-22
_RAW_DEFLATE = -15  # zlib's word for streams without a header: the container has one, and a checksum


@dataclass(frozen=True)
class CacheGenEncoderOutput:
    """An encoded chunk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    token_axis: int
    """2 in [L, 2, T, H, D], 3 in [L, 2, H, T, D]."""
    top: int
    """The largest symbol: bins / 2 - 1."""
    scales: torch.Tensor
    """[L, 2, T], float32."""
    streams: Sequence[Buffer]
    """Of each layer."""

    @property
    def num_heads(self) -> int:
        """KV heads of the chunk."""
        return self.shape[5 - self.token_axis]

    @property
    def head_size(self) -> int:
        """Elements per head."""
        return self.shape[4]

    @staticmethod
    def encode(kv: torch.Tensor, token_axis: int, bins: int) -> CacheGenEncoderOutput | None:
        """Encode KV of any floating dtype on any device; None if a value is not finite.

        ``bins`` is a power of two, 4 to 256.
        """
        half, top = bins // 2, bins // 2 - 1
        scales, streams = [], []
        for layer in kv.detach().transpose(2, token_axis):  # of [2, T, H, D], whichever the format
            values = layer.float()
            largest = values.abs().amax((2, 3), keepdim=True)
            if not bool(largest.isfinite().all()):
                return None
            scale = (largest / top * _SHRINK).clamp_(min=_SMALLEST_SCALE)
            numbers = (values / scale).round_().add_(top).to(torch.uint8)
            whole = numbers.movedim(1, -1).contiguous()
            middle = whole.float().mean(-1, keepdim=True).round_().to(torch.uint8)
            symbols = torch.cat((middle, (whole - middle + half) & (bins - 1)), -1)  # uint8 wraps
            coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, strategy=zlib.Z_HUFFMAN_ONLY)
            streams.append(coder.compress(tensor_bytes(symbols)) + coder.flush())
            scales.append(scale.reshape(2, -1))
        all_scales = torch.stack(scales).cpu()
        return CacheGenEncoderOutput(kv.dtype, tuple(kv.shape), token_axis, top, all_scales, streams)

    def decode(self) -> torch.Tensor:
        """Return the chunk, on the CPU. Raises ContainerError when a stream is not what ``encode`` makes."""
        channels, num_tokens = (2, self.num_heads, self.head_size), self.shape[self.token_axis]
        kv = empty_tensor(self.dtype, self.shape)
        layers = kv.transpose(2, self.token_axis)
        for layer, scale, stream in zip(layers, self.scales, self.streams, strict=True):
            raw = _inflate(stream, math.prod(channels) * (1 + num_tokens))
            symbols = tensor_from_bytes(raw, torch.uint8, (*channels, 1 + num_tokens))
            whole = (symbols[..., 1:] + symbols[..., :1] - (self.top + 1)) & (2 * self.top + 1)
            numbers = whole.movedim(-1, 1).contiguous().float().sub_(self.top)
            layer.copy_(numbers.mul_(scale[..., None, None]))
        return kv

    def to_bytes(self, label: bytes = b"") -> bytes:
        """Return the container, bound to ``label`` if that is given."""
        fields = _FIELDS.pack(self.token_axis, self.top)
        lengths = np.array([len(stream) for stream in self.streams], _LENGTH).tobytes()
        parts = [fields, lengths, tensor_bytes(self.scales), *self.streams]
        return pack(Kind.CACHEGEN, self.dtype, self.shape, parts, label)

    @staticmethod
    def from_bytes(bs: Buffer) -> CacheGenEncoderOutput:
        """Read what ``to_bytes`` wrote. Raises ContainerError, also for a container of another kind."""
        return CacheGenEncoderOutput.from_container(parse(bs))

    @staticmethod
    def from_container(container: Container) -> CacheGenEncoderOutput:
        """Check and take apart; allocates no more than there are bytes. Raises ContainerError."""
        kind, dtype, shape, payload = container
        if kind is not Kind.CACHEGEN or not is_encodable(dtype, shape) or len(payload) < _FIELDS.size:
            raise ContainerError(f"not KV that was encoded: {kind.name}, {dtype}, {shape}")
        token_axis, top = _FIELDS.unpack_from(payload)
        if token_axis not in (2, 3) or top == 0 or top & (top + 1):
            raise ContainerError(f"tokens on axis {token_axis} or {top} as the largest symbol is unknown")
        scales_at = _FIELDS.size + shape[0] * _LENGTH.itemsize
        streams_at = scales_at + shape[0] * 2 * shape[token_axis] * _SCALE.itemsize
        if len(payload) < streams_at:
            raise ContainerError(f"payload of {len(payload)} bytes is too short for {shape}")
        lengths = np.frombuffer(payload[_FIELDS.size : scales_at], _LENGTH)
        ends = streams_at + np.cumsum(lengths, dtype=np.int64)
        # A Huffman code has at least one bit: what is decoded has at most 8 symbols per byte of its stream.
        num_symbols = math.prod(shape[1:]) // shape[token_axis] * (1 + shape[token_axis])
        if ends[-1] != len(payload) or num_symbols > 8 * int(lengths.min()):
            raise ContainerError(f"lengths of the streams don't fit the payload or {shape}")
        scales = tensor_from_bytes(payload[scales_at:streams_at], _SCALE, (shape[0], 2, shape[token_axis]))
        streams = [
            payload[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
        return CacheGenEncoderOutput(dtype, shape, token_axis, top, scales, streams)


def is_encodable(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Is this KV that the codec takes: float16, bfloat16 or float32, five dimensions, K and V, not empty?"""
    is_coded = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return is_coded and len(shape) == 5 and shape[1] == 2 and 0 not in shape


def _inflate(stream: Buffer, length: int) -> bytes:
    """Decompress to exactly ``length`` bytes, and never more than one beyond. Raises ContainerError."""
    coder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        raw = coder.decompress(stream, length + 1)
    except zlib.error as error:
        raise ContainerError(f"damaged stream: {error}") from error
    if len(raw) != length or not coder.eof or coder.unused_data:
        raise ContainerError(f"a stream has not the {length} symbols that it should")
    return raw
