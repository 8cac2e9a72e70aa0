"""Serde "cachegen", the writing half (the codec and its format: cachegen_basics)."""

from __future__ import annotations

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde.cachegen_basics import CacheGenEncoderOutput, is_encodable
from lmcache.storage_backend.serde.serde import Serializer
from lmcache.storage_backend.serde.torch_serde import TorchSerializer

BINS = 32
"""Upstream takes 32 for the first layers and 16 after. 32 for all keeps answers four times as close (mean KL
divergence of the next token) for 30 % more bytes: docs/reference/serde.md."""

_TOKEN_AXES = {"vllm": 2, "huggingface": 3}


class CacheGenSerializer(Serializer):
    """KV [L, 2, T, H, D] ("vllm") or [L, 2, H, T, D] ("huggingface") to a container; lossy.

    With ``largest`` the largest magnitude of a token's K (or V) in one layer, every element x comes back
    within ``largest / (bins - 2)`` of its value, plus the rounding of its dtype.
    """

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, bins: int = BINS
    ) -> None:
        """Raises ValueError for an unknown ``metadata.fmt``, or ``bins`` that is not 4, 8, 16 … 256."""
        if metadata.fmt not in _TOKEN_AXES:
            raise ValueError(f"Invalid format: {metadata.fmt}")
        if bins not in (1 << power for power in range(2, 9)):
            raise ValueError(f"bins must be a power of two from 4 to 256, not {bins}")
        self.bins = bins
        self.num_raw = 0  # chunks that were stored raw, because the codec can't hold their values
        self._token_axis = _TOKEN_AXES[metadata.fmt]

    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """Encode a chunk. What can't be encoded (not finite, integers, 8-bit floats, empty, other shapes) is
        stored raw, without loss, and counted in ``num_raw``. Raises ValueError as Serializer does."""
        if is_encodable(t.dtype, t.shape):
            output = CacheGenEncoderOutput.encode(t, self._token_axis, self.bins)
            if output is not None:
                return output.to_bytes(label)
        self.num_raw += 1
        return TorchSerializer().to_bytes(t, label)
