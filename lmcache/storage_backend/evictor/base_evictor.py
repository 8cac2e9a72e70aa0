"""What an evictor is. It orders its caller's dictionary and says which keys go; it holds no chunk itself."""

from __future__ import annotations

import abc
from collections import OrderedDict
from enum import Enum
from typing import Any, TypeAlias

import torch

from lmcache.logging import init_logger
from lmcache.storage_backend.mem_pool import KVObj
from lmcache.utils import CacheEngineKey, DiskCacheMetadata

logger = init_logger(__name__)  # of the LMCache 0.1-0.3 API

Key: TypeAlias = CacheEngineKey | str
CacheDict: TypeAlias = "OrderedDict[Any, Any]"
"""Key -> KVObj, DiskCacheMetadata, tensor or bytes; the next victim first."""


class PutStatus(Enum):
    """May the chunk be put?"""

    LEGAL = 1
    ILLEGAL = 2  # it would not fit even if all others went


class BaseEvictor(abc.ABC):
    """Not thread-safe: called under the lock that protects the dictionary."""

    @abc.abstractmethod
    def update_on_get(self, key: Key, cache_dict: CacheDict) -> None:
        """The chunk under ``key`` was used."""

    @abc.abstractmethod
    def update_on_put(self, cache_dict: CacheDict, cache_size: int) -> tuple[list[Key], PutStatus]:
        """A chunk of ``cache_size`` bytes is about to be put.

        Returns the keys that the caller must remove from ``cache_dict`` first, and whether it may put at all.
        """

    def get_size(self, kv_obj: torch.Tensor | bytes | bytearray | KVObj | DiskCacheMetadata) -> int:
        """Return the bytes that ``kv_obj`` takes; raises Exception for any other type."""
        if isinstance(kv_obj, torch.Tensor):
            return kv_obj.numel() * kv_obj.element_size()
        if isinstance(kv_obj, (bytes, bytearray)):
            return len(kv_obj)
        if isinstance(kv_obj, (KVObj, DiskCacheMetadata)):
            return kv_obj.size
        raise Exception(f"Encountered unknown kv data type {type(kv_obj)}!")


class DummyEvictor(BaseEvictor):
    """Evicts nothing and allows everything."""

    def update_on_get(self, key: Key, cache_dict: CacheDict) -> None:
        """Do nothing."""

    def update_on_put(self, cache_dict: CacheDict, cache_size: int) -> tuple[list[Key], PutStatus]:
        """Allow it."""
        return [], PutStatus.LEGAL
