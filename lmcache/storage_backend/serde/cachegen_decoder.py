"""Serde "cachegen", the reading half (the codec and its format: cachegen_basics)."""

from __future__ import annotations

import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde.reading import ContainerDeserializer


class CacheGenDeserializer(ContainerDeserializer):
    """Container to tensor. Legacy bytes were pickled, and are refused."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dtype: torch.dtype
    ) -> None:
        super().__init__(dtype)
