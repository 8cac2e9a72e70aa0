"""Serde "torch": the elements as they are.

It writes a raw container and not ``torch.save``'s archive, which took ten times as long and which a reader
can't check; so legacy readers can't read it, while what they wrote is read here.
"""

from __future__ import annotations

import torch

from lmcache.storage_backend.serde import legacy
from lmcache.storage_backend.serde.container import Kind, pack, tensor_bytes
from lmcache.storage_backend.serde.reading import ContainerDeserializer
from lmcache.storage_backend.serde.serde import Serializer
from lmcache.tiers.header import Buffer


class TorchSerializer(Serializer):
    """Tensor to raw container: one copy and one checksum."""

    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """See Serializer."""
        return pack(Kind.RAW, t.dtype, t.shape, [tensor_bytes(t)], label)


class TorchDeserializer(ContainerDeserializer):
    """Container, or what ``torch.save`` wrote, to tensor."""

    def _read_legacy(self, bs: Buffer) -> torch.Tensor:
        return legacy.read_torch(bs)
