"""Serde "fast": the elements as they are. It writes what "torch" writes, and reads other legacy bytes."""

from __future__ import annotations

import torch

from lmcache.storage_backend.serde.container import tensor_from_bytes
from lmcache.storage_backend.serde.reading import ContainerDeserializer
from lmcache.storage_backend.serde.torch_serde import TorchSerializer
from lmcache.tiers.header import Buffer


class FastSerializer(TorchSerializer):
    """Tensor to raw container: one copy and one checksum."""


class FastDeserializer(ContainerDeserializer):
    """Container to tensor; legacy bytes (no shape, no checksum) to a tensor of one dimension."""

    def _read_legacy(self, bs: Buffer) -> torch.Tensor:
        return tensor_from_bytes(bs, self.dtype, [len(bs) // self.dtype.itemsize])
