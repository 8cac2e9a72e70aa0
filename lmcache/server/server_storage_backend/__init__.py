"""The server's storage backends: memory or a directory."""

from __future__ import annotations

import os
import shutil

from lmcache.server.server_storage_backend.abstract_backend import LMSBackendInterface
from lmcache.server.server_storage_backend.local_backend import LMSLocalBackend, LMSLocalDiskBackend

__all__ = ["CreateStorageBackend", "LMSBackendInterface", "LMSLocalBackend", "LMSLocalDiskBackend"]

_MEMORY_GB = 5.0


def CreateStorageBackend(
    device: str, max_size_gb: float | None = None, max_object_bytes: int = 1 << 30
) -> LMSBackendInterface:
    """Create the storage for ``device``: "cpu" for memory, otherwise a directory.

    ``max_size_gb`` is the capacity in GiB. Its default is 5 in memory, or half of the directory's volume.
    Raises ValueError for "cuda" and for an invalid size. Raises OSError or
    ``lmcache_store.tiers.disk.files.DiskError`` if the directory is unusable.
    """
    if max_size_gb is not None and not 0 < max_size_gb < 1 << 30:
        raise ValueError(f"{max_size_gb} GiB is not a size: write a positive number of GiB")
    if device.startswith("cuda"):
        raise ValueError('storage "cuda" is not supported: write cpu, or a directory')
    if device == "cpu":
        return LMSLocalBackend(int((max_size_gb or _MEMORY_GB) * 1024**3))
    os.makedirs(device, exist_ok=True)
    half = shutil.disk_usage(device).total // 2
    return LMSLocalDiskBackend(device, int(max_size_gb * 1024**3) if max_size_gb else half, max_object_bytes)
