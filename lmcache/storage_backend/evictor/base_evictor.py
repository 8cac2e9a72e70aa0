"""The interface of evictors. An evictor orders its caller's dictionary and chooses the keys to remove."""

from __future__ import annotations

import abc
from collections import OrderedDict
from enum import Enum
from typing import Any, TypeAlias

import torch

from lmcache.logging import init_logger
from lmcache.storage_backend.mem_pool import KVObj
from lmcache.utils import CacheEngineKey, DiskCacheMetadata

logger = init_logger(__name__)  # part of the LMCache 0.1-0.3 API

Key: TypeAlias = CacheEngineKey | str
CacheDict: TypeAlias = "OrderedDict[Any, Any]"
"""Dictionary of keys to KVObj, DiskCacheMetadata, tensor or bytes, the next victim first."""


class PutStatus(Enum):
    """An evictor's answer whether a chunk may be put."""

    LEGAL = 1
    ILLEGAL = 2  # the chunk would not fit even if all others were removed


class BaseEvictor(abc.ABC):
    """Chooses victims. Not thread-safe: the caller must hold the lock that protects the dictionary."""

    @abc.abstractmethod
    def update_on_get(self, key: Key, cache_dict: CacheDict) -> None:
        """Note that the chunk under ``key`` was used."""

    @abc.abstractmethod
    def update_on_put(self, cache_dict: CacheDict, cache_size: int) -> tuple[list[Key], PutStatus]:
        """Choose the chunks to evict before a put of ``cache_size`` bytes.

        Returns the keys that the caller must first remove from ``cache_dict``, and whether it may put the
        chunk.
        """

    def get_size(self, kv_obj: torch.Tensor | bytes | bytearray | KVObj | DiskCacheMetadata) -> int:
        """Return the bytes of ``kv_obj``. Raises Exception for any other type."""
        if isinstance(kv_obj, torch.Tensor):
            return kv_obj.numel() * kv_obj.element_size()
        if isinstance(kv_obj, (bytes, bytearray)):
            return len(kv_obj)
        if isinstance(kv_obj, (KVObj, DiskCacheMetadata)):
            return kv_obj.size
        raise Exception(f"Encountered unknown kv data type {type(kv_obj)}!")


class DummyEvictor(BaseEvictor):
    """An evictor that evicts nothing and allows every put."""

    def update_on_get(self, key: Key, cache_dict: CacheDict) -> None:
        """Do nothing."""

    def update_on_put(self, cache_dict: CacheDict, cache_size: int) -> tuple[list[Key], PutStatus]:
        """Allow the put without victims."""
        return [], PutStatus.LEGAL
