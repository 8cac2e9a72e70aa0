"""The serdes: one deserializer for all containers, and one serializer for each kind of payload.

A **serde** converts a chunk's tensor to bytes and back. The bytes are a **container**: a header, and a
payload of one of three kinds: raw, safetensors or cachegen. A **label**, such as the chunk's key, may bind a
container: only a reader with the same label can read it.

Values of LMCache 0.1-0.3 are no containers, and are refused: they have no checksum, and some are pickled.
LMCache 0.1-0.3 can't read values of this version.
"""

from __future__ import annotations

import safetensors.torch
import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde.cachegen_basics import CacheGenEncoderOutput, is_encodable
from lmcache.storage_backend.serde.container import (
    ContainerError,
    PayloadKind,
    pack,
    parse,
    tensor_bytes,
    tensor_from_bytes,
)
from lmcache.storage_backend.serde.serde import Deserializer, Serializer, timed
from lmcache.utils import token_dim
from lmcache_store.tiers.header import Buffer

_TENSOR_NAME = "tensor_bytes"
"""Name of the one tensor in a safetensors payload."""

BINS = 32
"""Number of quantization levels. The original CacheGen uses 32 for the first layers and 16 after them.
Compared with it, 32 for all layers take 30 % more bytes and divide the mean KL divergence of the next token
by four (docs/reference/serde.md)."""


class ContainerDeserializer(Deserializer):
    """Reads containers of all serdes."""

    @timed
    @torch.inference_mode(False)
    def from_bytes(self, bs: Buffer, label: bytes = b"") -> torch.Tensor:
        """See Deserializer."""
        return _cast(_read(bs, label), self.dtype)


class RawSerializer(Serializer):
    """Writes a container with the unchanged elements of a tensor: one copy and one checksum."""

    @timed
    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """See Serializer."""
        return pack(PayloadKind.RAW, t.dtype, t.shape, [tensor_bytes(t)], label)


class SafetensorsSerializer(Serializer):
    """Writes a container whose payload is a safetensors file with one tensor, "tensor_bytes".

    If you remove the container's header, any tool can read the file.
    """

    @timed
    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """See Serializer."""
        file = safetensors.torch.save({_TENSOR_NAME: t.detach().cpu().contiguous()})
        return pack(PayloadKind.SAFETENSORS, t.dtype, t.shape, [file], label)


class CacheGenSerializer(Serializer):
    """Writes a container with lossy compressed KV.

    KV is [L, 2, T, H, D] in format "vllm" and [L, 2, H, T, D] in format "huggingface". Let ``largest`` be the
    largest magnitude of a token's K (or V) in one layer. The error of each element is then at most
    ``largest / (bins - 2)``, plus the rounding of its dtype.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, bins: int = BINS
    ) -> None:
        """Quantize to ``bins`` levels: a power of two from 4 to 256.

        Raises ValueError for other ``bins`` and for an unknown ``metadata.fmt``.
        """
        self._token_axis = 2 + token_dim(metadata.fmt)
        if bins not in (1 << power for power in range(2, 9)):
            raise ValueError(f"bins must be a power of two from 4 to 256, not {bins}")
        self.bins = bins
        self.num_raw = 0  # chunks stored without compression, because the codec can't encode them

    @timed
    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """Encode a chunk.

        Chunks that can't be encoded are stored raw, without loss, and counted in ``num_raw``. These are
        chunks with infinite or NaN values, integers, 8-bit floats, no elements, or a shape that is not that
        of KV.

        Raises ValueError for a dtype that no container supports, or for more than 8 dimensions.
        """
        if is_encodable(t.dtype, t.shape):
            output = CacheGenEncoderOutput.encode(t, self._token_axis, self.bins)
            if output is not None:
                return output.to_bytes(label)
        self.num_raw += 1
        return RawSerializer().to_bytes(t, label)


def _read(bs: Buffer, label: bytes) -> torch.Tensor:
    kind, dtype, shape, payload = container = parse(bs, label)
    if kind is PayloadKind.RAW:
        return tensor_from_bytes(payload, dtype, shape)
    if kind is PayloadKind.CACHEGEN:
        return CacheGenEncoderOutput.from_container(container).decode()
    try:
        tensor = safetensors.torch.load(bytes(payload))[_TENSOR_NAME]
    except Exception as error:  # the parser's errors have no common base class
        raise ContainerError(f"not a safetensors file with {_TENSOR_NAME}: {error}") from error
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ContainerError(f"payload is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor as ``dtype``.

    Raises ContainerError if a value would be clipped or become infinite.
    """
    if tensor.dtype == dtype:
        return tensor
    if not (tensor.is_floating_point() and dtype.is_floating_point):
        raise ContainerError(f"{tensor.dtype} is not cast to {dtype}")
    exact, cast = tensor.double(), tensor.to(dtype)
    # Infinity is larger than every maximum, but it is valid if the dtype can represent it.
    if bool(((exact.abs() > torch.finfo(dtype).max) & (cast.double() != exact)).any()):
        raise ContainerError(f"values are too large for {dtype}")
    return cast
