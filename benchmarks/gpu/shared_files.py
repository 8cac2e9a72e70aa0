"""Files of a run in /dev/shm: their names, the free memory for them, and their removal after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

from lmcache_store.tiers.memory.capacity import available_memory

FOLDER = Path("/dev/shm")


def prefix(run: Path) -> str:
    """Return the begin of the names of a run's files. Other runs on this machine use other names.

    Args:
        run: folder of the run's results. Its name is unique.
    """
    return f"lmc-gpu-check-{run.name}-"


def remove(run: Path) -> list[str]:
    """Remove the files that a step left because it was killed. Returns their names."""
    paths = sorted(path for path in FOLDER.glob("lmc-gpu-check-*") if path.name.startswith(prefix(run)))
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in paths]


def free_bytes(reserve: int = 0) -> int:
    """Return the bytes that /dev/shm and the memory limit of this container leave for files.

    Args:
        reserve: bytes below the memory limit that processes need.
    """
    free = shutil.disk_usage(FOLDER).free
    available = available_memory()
    return free if available is None else max(0, min(free, available - reserve))
