"""The interface of serdes. A serde converts the tensor of a chunk to bytes for a remote store, and back."""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from lmcache.config import GlobalConfig
from lmcache.logging import init_logger
from lmcache_store.tiers.header import Buffer

logger = init_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Serializer(abc.ABC):
    """Converts tensors to bytes."""

    @abc.abstractmethod
    def to_bytes(self, t: torch.Tensor, label: bytes = b"") -> bytes:
        """Return a container with the tensor, which may have any strides and be on any device.

        If ``label`` is given, the container is bound to it (see ``container``). Raises ValueError for a dtype
        that ``container.DTYPES`` does not list, or for more than 8 dimensions.
        """


class Deserializer(abc.ABC):
    """Converts bytes to tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abc.abstractmethod
    def from_bytes(self, bs: Buffer, label: bytes = b"") -> torch.Tensor:
        """Return a writable tensor of ``dtype`` on the CPU that owns its memory, also in inference mode.

        A tensor of another dtype is cast if both dtypes are floating point and every finite value is in
        range.

        Raises ContainerError if the bytes can't be read or cast, or if the container is not bound to
        ``label``.
        """


def timed(function: Callable[P, T]) -> Callable[P, T]:
    """Log the duration of each call at level DEBUG, if ``GlobalConfig.is_debug()``."""

    @functools.wraps(function)
    def timed_call(*args: P.args, **kwargs: P.kwargs) -> T:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        if GlobalConfig.is_debug():
            logger.debug("%s took %.3f s", function.__qualname__, time.perf_counter() - started)
        return result

    return timed_call
