"""Checks that there is enough memory for an arena, before the arena takes any.

The check comes first, because the kernel reports a later lack of memory by SIGBUS or by the OOM killer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_store.common.units import format_size
from lmcache_store.tiers.errors import ArenaError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_PROCESS_BYTES = 64 << 20
"""Memory that the process needs besides the arena: interpreter, gRPC buffers, index, and their growth."""


class _Files(NamedTuple):
    """Names of the files of one version of cgroups."""

    limit: str
    used: str
    caches: tuple[str, str]
    """Keys of ``memory.stat`` for cached file pages, which the kernel drops before it kills a process."""


_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def check_capacity(path: Path, capacity_bytes: int, present_bytes: int = 0) -> None:
    """Raise ArenaError if there is not enough memory for an arena of ``capacity_bytes``.

    The file already holds ``present_bytes`` of them."""
    volume = os.statvfs(path.parent)
    free = volume.f_bavail * volume.f_frsize
    missing = capacity_bytes - present_bytes
    if missing > free:
        raise ArenaError(
            f"not enough memory for the arena: {path} needs {format_size(missing)} more, "
            f"its volume has {format_size(free)} free; "
            f"increase the volume (sizeLimit of the emptyDir) or reduce the memory tier"
        )
    limit = memory_limit()
    if limit is not None and capacity_bytes + _PROCESS_BYTES > limit:
        raise ArenaError(
            f"not enough memory for the arena: {path} needs {format_size(capacity_bytes)} and the process "
            f"{format_size(_PROCESS_BYTES)}, but the memory limit of this container is {format_size(limit)}; "
            f"increase the limit or reduce the memory tier"
        )


def volume_bytes(path: Path) -> int:
    """Return the size of the volume of a file, which need not exist; 0 if its folder does not exist."""
    try:
        volume = os.statvfs(path.parent)
    except OSError:
        return 0
    return volume.f_blocks * volume.f_frsize


def check_available(num_bytes: int) -> None:
    """Raise ArenaError if the process can't take ``num_bytes`` more within its memory limit."""
    free = available_memory()
    if free is not None and num_bytes + _PROCESS_BYTES > free:
        raise ArenaError(
            f"the arena can't grow by {format_size(num_bytes)}: the memory limit of this container leaves "
            f"{format_size(max(0, free))}, of which {format_size(_PROCESS_BYTES)} must stay free; increase it"
        )


def memory_limit(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the lowest memory limit of the process's cgroup and its parents (v1 or v2), or None."""
    return min((limit for _, _, limit in _limits(root, membership)), default=None)


def available_memory(root: Path = _CGROUP_ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes that the process's cgroup and all its parents can still take; None: no limit."""
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
        # In a container, the group's path may be the host's path. The files are then at the root.
        folder = base / group.strip("/")
        for candidate in (folder, *folder.parents):
            for text in _lines(candidate / files.limit):
                if text.isdigit() and int(text) < 1 << 60:  # "no limit" is a huge number in v1
                    yield candidate, files, int(text)
            if candidate == base:
                break


def _used(folder: Path, files: _Files) -> int:
    """Return the used bytes that the kernel can't free by dropping cached file pages; tmpfs is used."""
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return sum(map(int, _lines(folder / files.used))) - sum(int(stat.get(key, 0)) for key in files.caches)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
