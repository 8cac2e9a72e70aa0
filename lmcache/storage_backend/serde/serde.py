"""What every serde offers. A serde turns the tensor of a chunk into bytes for a remote store, and back."""

from __future__ import annotations

import abc
import time

import torch

from lmcache.logging import init_logger
from lmcache.tiers.header import Buffer

logger = init_logger(__name__)


class Serializer(abc.ABC):
    """Tensor to bytes."""

    @abc.abstractmethod
    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """Return a container with the tensor (any strides, any device), which is not changed; bound to
        ``label`` if that is given (``container``).

        Raises ValueError for a dtype that ``container.DTYPES`` does not list, or more than 8 dimensions.
        """


class Deserializer(abc.ABC):
    """Bytes to tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abc.abstractmethod
    def from_bytes(self, bs: Buffer, label: bytes = b"") -> torch.Tensor:
        """Return a tensor of ``dtype`` on the CPU that owns its memory and may be written, in inference mode
        or not.

        What has another dtype is cast if both are floating point and every finite value is in its range.
        Raises ContainerError for everything that can't be read, or not be cast, and for a container that is
        not bound to ``label``; legacy bytes, which nothing binds, are read whatever it is.
        """


class SerializerDebugWrapper(Serializer):
    """Log, at level DEBUG, how long each call took."""

    def __init__(self, serializer: Serializer) -> None:
        self.serializer = serializer

    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """See Serializer."""
        start = time.perf_counter()
        bs = self.serializer.to_bytes(t, label)
        logger.debug("Serialized %d bytes in %.3f s", len(bs), time.perf_counter() - start)
        return bs


class DeserializerDebugWrapper(Deserializer):
    """Log, at level DEBUG, how long each call took."""

    def __init__(self, deserializer: Deserializer) -> None:
        super().__init__(deserializer.dtype)
        self.deserializer = deserializer

    def from_bytes(self, bs: Buffer, label: bytes = b"") -> torch.Tensor:
        """See Deserializer."""
        start = time.perf_counter()
        tensor = self.deserializer.from_bytes(bs, label)
        logger.debug("Deserialized %d bytes in %.3f s", len(bs), time.perf_counter() - start)
        return tensor
