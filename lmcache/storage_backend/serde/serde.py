"""What every serde offers. A serde turns the tensor of a chunk into bytes for a remote store, and back."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from lmcache.config import GlobalConfig
from lmcache.logging import init_logger
from lmcache.tiers.header import Buffer

logger = init_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


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


def timed(function: Callable[P, T]) -> Callable[P, T]:
    """Log, at level DEBUG, how long each call took, while ``GlobalConfig`` says so."""

    @functools.wraps(function)
    def timed_call(*args: P.args, **kwargs: P.kwargs) -> T:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        if GlobalConfig.is_debug():
            logger.debug("%s took %.3f s", function.__qualname__, time.perf_counter() - started)
        return result

    return timed_call
