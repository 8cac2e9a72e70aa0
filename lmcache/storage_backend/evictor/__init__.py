"""Evictors: they choose the chunks that a backend removes when it needs memory."""

from lmcache.storage_backend.evictor.base_evictor import BaseEvictor, DummyEvictor, PutStatus
from lmcache.storage_backend.evictor.lru_evictor import LRUEvictor

__all__ = ["BaseEvictor", "DummyEvictor", "LRUEvictor", "PutStatus"]
