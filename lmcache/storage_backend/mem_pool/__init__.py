"""Memory pools for chunks, as tensors on the host or on a GPU."""

from lmcache.storage_backend.mem_pool.local_pool import (
    BasePool,
    KVObj,
    LocalCPUBufferPool,
    LocalCPUPool,
    LocalGPUPool,
    LocalPool,
)
from lmcache.storage_backend.mem_pool.torch_arena import TorchArena

__all__ = [
    "BasePool",
    "KVObj",
    "LocalCPUBufferPool",
    "LocalCPUPool",
    "LocalGPUPool",
    "LocalPool",
    "TorchArena",
]
