"""The "cachegen" codec: quantizes KV per token, and then entropy-codes it.

1. **Quantize.** The K (or V) of one token in one layer is divided by its **scale** and rounded. The scale is
   the largest magnitude divided by ``bins / 2 - 1``. The results are integers from ``1 - bins / 2`` to
   ``bins / 2 - 1``.
2. **Subtract.** The **middle** of a channel is its rounded mean over the chunk's tokens. Each integer becomes
   its difference from the middle, modulo ``bins``, because channels of K have very different means.
3. **Code.** zlib Huffman-codes these symbols (Z_HUFFMAN_ONLY), channel by channel, tokens in order, one
   stream per layer. It starts a new table every 16 Ki symbols, so that tables fit layers and heads.

zlib is used because torch and NumPy have no operation for entropy coding. It is part of every Python,
releases the GIL, and takes about 5 ns per symbol. Its output is 1 to 3 % larger than the entropy of each
table's symbols.

The payload after the container's header is little-endian. For shape [L, 2, T, H, D] or [L, 2, H, T, D]:

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
    PayloadKind,
    empty_tensor,
    pack,
    parse,
    tensor_bytes,
    tensor_from_bytes,
)
from lmcache_store.tiers.header import Buffer

_FIELDS = struct.Struct("<BBxx")
_LENGTH = np.dtype("<u4")
_SCALE = torch.float32
_SMALLEST_SCALE = torch.finfo(_SCALE).smallest_normal  # smaller scales are too imprecise
# With this factor, top * scale is at most the largest magnitude, so that decoding does not overflow.
_SHRINK = 1 - 2**-22
_RAW_DEFLATE = -15  # zlib's value for streams without header and checksum; the container has both


@dataclass(frozen=True)
class CacheGenEncoderOutput:
    """An encoded chunk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    token_axis: int
    """Axis of the tokens: 2 in [L, 2, T, H, D], 3 in [L, 2, H, T, D]."""
    top: int
    """Largest quantized value: bins / 2 - 1."""
    scales: torch.Tensor
    """Scales, [L, 2, T], float32."""
    streams: Sequence[Buffer]
    """Coded symbols, one stream per layer."""

    @property
    def num_heads(self) -> int:
        """Number of KV heads of the chunk."""
        return self.shape[5 - self.token_axis]

    @property
    def head_size(self) -> int:
        """Elements per head."""
        return self.shape[4]

    @staticmethod
    def encode(kv: torch.Tensor, token_axis: int, bins: int) -> CacheGenEncoderOutput | None:
        """Encode KV of any floating dtype on any device. Returns None if a value is not finite.

        ``bins`` is a power of two, 4 to 256.
        """
        half, top = bins // 2, bins // 2 - 1
        scales, streams = [], []
        for layer in kv.detach().transpose(2, token_axis):  # [2, T, H, D] in both formats
            values = layer.float()
            largest = values.abs().amax((2, 3), keepdim=True)
            if not bool(largest.isfinite().all()):
                return None
            scale = (largest / top * _SHRINK).clamp_(min=_SMALLEST_SCALE)
            numbers = (values / scale).round_().add_(top).to(torch.uint8)
            whole = numbers.movedim(1, -1).contiguous()
            middle = whole.float().mean(-1, keepdim=True).round_().to(torch.uint8)
            symbols = torch.cat((middle, (whole - middle + half) & (bins - 1)), -1)  # uint8 wraps around
            coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, strategy=zlib.Z_HUFFMAN_ONLY)
            streams.append(coder.compress(tensor_bytes(symbols)) + coder.flush())
            scales.append(scale.reshape(2, -1))
        all_scales = torch.stack(scales).cpu()
        return CacheGenEncoderOutput(kv.dtype, tuple(kv.shape), token_axis, top, all_scales, streams)

    def decode(self) -> torch.Tensor:
        """Return the chunk, on the CPU. Raises ContainerError if a stream is invalid."""
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
        """Return the container, bound to ``label`` if given."""
        fields = _FIELDS.pack(self.token_axis, self.top)
        lengths = np.array([len(stream) for stream in self.streams], _LENGTH).tobytes()
        parts = [fields, lengths, tensor_bytes(self.scales), *self.streams]
        return pack(PayloadKind.CACHEGEN, self.dtype, self.shape, parts, label)

    @staticmethod
    def from_bytes(bs: Buffer) -> CacheGenEncoderOutput:
        """Parse the bytes that ``to_bytes`` returns.

        Raises ContainerError, also for another kind of container.
        """
        return CacheGenEncoderOutput.from_container(parse(bs))

    @staticmethod
    def from_container(container: Container) -> CacheGenEncoderOutput:
        """Parse and check a payload; allocates no more memory than its bytes. Raises ContainerError."""
        kind, dtype, shape, payload = container
        if kind is not PayloadKind.CACHEGEN or not is_encodable(dtype, shape) or len(payload) < _FIELDS.size:
            raise ContainerError(f"not KV of this codec: {kind.name}, {dtype}, {shape}")
        token_axis, top = _FIELDS.unpack_from(payload)
        if token_axis not in (2, 3) or top == 0 or top & (top + 1):
            raise ContainerError(f"tokens on axis {token_axis} or {top} as the largest symbol is unknown")
        scales_start = _FIELDS.size + shape[0] * _LENGTH.itemsize
        streams_start = scales_start + shape[0] * 2 * shape[token_axis] * _SCALE.itemsize
        if len(payload) < streams_start:
            raise ContainerError(f"payload of {len(payload)} bytes is too short for {shape}")
        lengths = np.frombuffer(payload[_FIELDS.size : scales_start], _LENGTH)
        ends = streams_start + np.cumsum(lengths, dtype=np.int64)
        # A Huffman code has at least one bit, so a stream decodes to at most 8 symbols per byte.
        num_symbols = math.prod(shape[1:]) // shape[token_axis] * (1 + shape[token_axis])
        if ends[-1] != len(payload) or num_symbols > 8 * int(lengths.min()):
            raise ContainerError(f"lengths of the streams don't fit the payload or {shape}")
        scales_shape = shape[0], 2, shape[token_axis]
        scales = tensor_from_bytes(payload[scales_start:streams_start], _SCALE, scales_shape)
        streams = [
            payload[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
        return CacheGenEncoderOutput(dtype, shape, token_axis, top, scales, streams)


def is_encodable(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return whether the codec supports this KV: float16, bfloat16 or float32, not empty, [L, 2, …, …, D]."""
    is_supported = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return is_supported and len(shape) == 5 and shape[1] == 2 and 0 not in shape


def _inflate(stream: Buffer, length: int) -> bytes:
    """Decompress to exactly ``length`` bytes; stops one byte after them. Raises ContainerError."""
    coder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        raw = coder.decompress(stream, length + 1)
    except zlib.error as error:
        raise ContainerError(f"damaged stream: {error}") from error
    if len(raw) != length or not coder.eof or coder.unused_data:
        raise ContainerError(f"a stream does not have exactly {length} symbols")
    return raw
