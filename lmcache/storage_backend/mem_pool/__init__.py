"""Pools: memory for chunks on the host or on the GPU, as tensors."""

from lmcache.storage_backend.mem_pool.base_pool import BasePool, KVObj

__all__ = ["BasePool", "KVObj"]
