"""Evictors: which chunks of a backend's dictionary go when room is needed."""

from lmcache.storage_backend.evictor.base_evictor import BaseEvictor, DummyEvictor, PutStatus
from lmcache.storage_backend.evictor.lru_evictor import LRUEvictor

__all__ = ["BaseEvictor", "DummyEvictor", "LRUEvictor", "PutStatus"]
