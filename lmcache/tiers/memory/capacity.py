"""Is there room for an arena? Asked before any is taken: later the kernel answers with SIGBUS or the OOM
killer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache.tiers.errors import ArenaError
from lmcache.units import format_size

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

# Beside the arena: what interpreter, gRPC buffers and index take, and may come to take while it grows.
_PROCESS_BYTES = 64 << 20


class _Files(NamedTuple):
    """Of one version of cgroups."""

    limit: str
    used: str
    caches: tuple[str, str]
    """Keys of ``memory.stat``: pages of files, which the kernel drops before it kills."""


_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


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


def volume_bytes(path: Path) -> int:
    """Size of the volume on which a file is, or will be; 0: there is none."""
    try:
        volume = os.statvfs(path.parent)
    except OSError:
        return 0
    return volume.f_blocks * volume.f_frsize


def check_room(num_bytes: int) -> None:
    """Raise ArenaError when the process can't take so much more without being killed for it."""
    room = memory_room()
    if room is not None and num_bytes + _PROCESS_BYTES > room:
        raise ArenaError(
            f"no room for {format_size(num_bytes)} more of the arena: the memory limit of this container "
            f"leaves {format_size(max(0, room))}, of which {format_size(_PROCESS_BYTES)} stay free; raise it"
        )


def memory_limit(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Smallest memory limit of the process's cgroup and those above it, v2 or v1; None: no limit."""
    return min((limit for _, _, limit in _limits(root, membership)), default=None)


def memory_room(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the process's cgroup, and each above it, can still take; None: no limit."""
    return min(
        (limit - _used(folder, files) for folder, files, limit in _limits(root, membership)), default=None
    )


def _limits(root: Path, membership: Path) -> Iterator[tuple[Path, _Files, int]]:
    for line in _lines(membership):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, files = root, _V2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", _V1
        else:
            continue
        # In a container the group's path may be the host's: the files then lie at the root.
        folder = base / group.strip("/")
        for candidate in (folder, *folder.parents):
            for text in _lines(candidate / files.limit):
                if text.isdigit() and int(text) < 1 << 60:  # "no limit" is a huge number in v1
                    yield candidate, files, int(text)
            if candidate == base:
                break


def _used(folder: Path, files: _Files) -> int:
    """Bytes that can't be had by dropping cached pages of files (those of tmpfs are no such pages)."""
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return sum(map(int, _lines(folder / files.used))) - sum(int(stat.get(key, 0)) for key in files.caches)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
