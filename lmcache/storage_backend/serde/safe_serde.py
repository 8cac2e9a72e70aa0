"""Serde "safetensor": what follows the container's header is a safetensors file that any tool reads."""

from __future__ import annotations

import safetensors.torch
import torch

from lmcache.storage_backend.serde import legacy
from lmcache.storage_backend.serde.container import Kind, pack
from lmcache.storage_backend.serde.reading import ContainerDeserializer
from lmcache.storage_backend.serde.serde import Serializer
from lmcache.tiers.header import Buffer


class SafeSerializer(Serializer):
    """Tensor to a container with ``{"tensor_bytes": tensor}``."""

    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """See Serializer."""
        file = safetensors.torch.save({legacy.TENSOR_NAME: t.detach().cpu().contiguous()})
        return pack(Kind.SAFETENSORS, t.dtype, t.shape, [file], label)


class SafeDeserializer(ContainerDeserializer):
    """Container, or a bare safetensors file, to tensor."""

    def _read_legacy(self, bs: Buffer) -> torch.Tensor:
        return legacy.read_safetensors(bs)
