"""Is there room for an arena? Asked before any is taken: later the kernel answers with SIGBUS or the OOM
killer."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache.tiers.errors import ArenaError
from lmcache.units import format_size

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# What the process itself needs beside its arena: interpreter, gRPC buffers, index.
_PROCESS_BYTES = 64 << 20


def check_capacity(path: Path, capacity_bytes: int, present_bytes: int = 0) -> None:
    """Raise ArenaError when ``capacity_bytes`` can't be had, of which the file holds ``present_bytes``
    already."""
    volume = os.statvfs(path.parent)
    free = volume.f_bavail * volume.f_frsize
    missing = capacity_bytes - present_bytes
    if missing > free:
        raise ArenaError(
            f"no room for the arena: {path} needs {format_size(missing)} more, "
            f"its volume has {format_size(free)} free; "
            f"enlarge the volume (sizeLimit of the emptyDir) or make the memory tier smaller"
        )
    limit = memory_limit()
    if limit is not None and capacity_bytes + _PROCESS_BYTES > limit:
        raise ArenaError(
            f"no room for the arena: {path} needs {format_size(capacity_bytes)} and the process "
            f"{format_size(_PROCESS_BYTES)}, the memory limit of this container is {format_size(limit)}; "
            f"raise it or make the memory tier smaller"
        )


def memory_limit(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Smallest memory limit of the process's cgroup and those above it, v2 or v1; None: no limit."""
    limits = []
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the group's path may be the host's: the files then lie at the root.
        folder = base / group.strip("/")
        for candidate in (folder, *folder.parents):
            limits += [int(text) for text in _lines(candidate / name) if text.isdigit()]
            if candidate == base:
                break
    # "No limit" is a huge number in v1.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
