"""The library's storage backends: thin adapters between torch tensors and the storage core.

``mem_pool`` has the memory for chunks, and ``evictor`` chooses the chunks to remove. For remote stores,
``connector`` selects the client by URL, and ``serde`` converts tensors to bytes and back.
"""

from __future__ import annotations

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface

__all__ = ["CreateStorageBackend"]


def CreateStorageBackend(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
) -> LMCBackendInterface:
    """Create the storage backend that ``config`` describes.

    ``local_device`` (see ``config.parse_local_device``) gives a backend in memory or in a directory, and
    ``remote_url`` a remote one. If both are set, the result combines them. Retrieved chunks are on
    ``dst_device``, or on the CPU if CUDA is not available.

    Raises ValueError("Invalid configuration…") if neither is set, and ValueError for an invalid
    ``local_device``.
    """
    # Imports are local, so that a program without remote storage does not need the packages for it.
    pool = LMCacheMemPoolMetadata(metadata.kv_shape, metadata.kv_dtype, config.max_local_cache_size)
    match config:
        case LMCacheEngineConfig(local_device=None, remote_url=None):
            raise ValueError(f"Invalid configuration, neither local_device nor remote_url is set: {config}")
        case LMCacheEngineConfig(local_device=None):
            from lmcache.storage_backend.remote_backend import create_remote_backend

            return create_remote_backend(config, metadata, dst_device)
        case LMCacheEngineConfig(remote_url=None):
            from lmcache.storage_backend.local_backend import create_local_backend

            return create_local_backend(config, metadata, pool, dst_device)
        case _:
            from lmcache.storage_backend.hybrid_backend import LMCHybridBackend

            return LMCHybridBackend(config, metadata, pool, dst_device)
