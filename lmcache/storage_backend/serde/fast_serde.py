"""Serde "fast": the elements as they are. It writes and reads what "torch" writes.

Its legacy bytes are not read: they had neither a shape nor a checksum, so that anything would have passed.
"""

from __future__ import annotations

from lmcache.storage_backend.serde.reading import ContainerDeserializer
from lmcache.storage_backend.serde.torch_serde import TorchSerializer


class FastSerializer(TorchSerializer):
    """Tensor to raw container: one copy and one checksum."""


class FastDeserializer(ContainerDeserializer):
    """Container to tensor."""
