"""The control group of a node's pods: one in each hierarchy of version 1, or one in version 2."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids", "hugetlb")
# On a machine without other groups, all pods together weigh as much as one process. Four times as much lets
# engines start next to other work.
_SHARES, _WEIGHT = "4096", "400"


def make(name: str) -> None:
    """Create the groups, because a kubelet refuses a missing parent. Raises OSError if that is impossible."""
    if not hierarchies():
        raise FileNotFoundError(f"there are no hierarchies at {ROOT}")
    for hierarchy in hierarchies():
        if is_version_2():
            available = (hierarchy / "cgroup.controllers").read_text().split()
            enabled = " ".join(f"+{controller}" for controller in _CONTROLLERS if controller in available)
            (hierarchy / "cgroup.subtree_control").write_text(enabled)
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if (hierarchy / "cpuset.cpus").exists():  # version 1: a new group has none
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((hierarchy / file).read_text())
        if (group / "cpu.shares").exists():
            (group / "cpu.shares").write_text(_SHARES)
        if is_version_2():
            (group / "cpu.weight").write_text(_WEIGHT)


def remove(name: str, *, itself: bool = True) -> bool:
    """Remove the groups of ended processes. Returns whether all groups are removed."""
    for hierarchy in hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            if itself or directory != str(hierarchy / name):
                with contextlib.suppress(OSError):  # a process in it has not ended yet
                    os.rmdir(directory)
    return not any((hierarchy / name).exists() for hierarchy in hierarchies())


def hierarchies() -> list[Path]:
    """Hierarchies in which groups can be created."""
    if is_version_2():
        return [ROOT]
    return [path for path in ROOT.iterdir() if not path.is_symlink() and (path / "cgroup.procs").exists()]


def is_version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def of_container(name: str, container_id: str, controller: str = "memory") -> Path:
    """The group of one container below the group ``name``. Raises FileNotFoundError if it does not exist."""
    top = ROOT / name if is_version_2() else ROOT / controller / name
    for path in top.rglob(f"*{container_id}*") if container_id else ():
        if path.is_dir():
            return path
    raise FileNotFoundError(f"no group of container {container_id!r} under {top}")


def is_empty(group: Path) -> bool:
    """Whether all processes in the group have ended."""
    with contextlib.suppress(OSError):  # the group was removed
        return not (group / "cgroup.procs").read_text()
    return True


def memory_limit(group: Path) -> int:
    """The group's memory limit in bytes."""
    file = group / ("memory.max" if is_version_2() else "memory.limit_in_bytes")
    return int(file.read_text())


def memory_peak(group: Path) -> int:
    """Maximum bytes in use so far."""
    file = group / ("memory.peak" if is_version_2() else "memory.max_usage_in_bytes")
    return int(file.read_text())


def num_oom_kills(group: Path) -> int:
    """Number of its processes that the kernel killed for memory."""
    text = (group / ("memory.events" if is_version_2() else "memory.oom_control")).read_text()
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])
