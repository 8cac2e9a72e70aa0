"""The library's storage backends: thin torch faces over the storage core."""

from __future__ import annotations

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, LMCacheMemPoolMetadata
from lmcache.storage_backend.abstract_backend import LMCBackendInterface

__all__ = ["CreateStorageBackend"]


def CreateStorageBackend(
    config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, dst_device: str = "cuda"
) -> LMCBackendInterface:
    """Build what ``config`` speaks of; chunks come back on ``dst_device`` (the CPU when there is no CUDA).

    ``local_device`` (``config.parse_local_device``): memory or a directory; with a ``remote_url`` as well:
    both together. Raises ValueError("Invalid configuration…") when there is neither, and for a
    ``local_device`` that is none.
    """
    # Imported when asked for: who needs no remote storage needs none of its packages.
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
