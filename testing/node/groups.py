"""The control group that a node's pods are under: in each hierarchy of version 1, or in that of version 2."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids", "hugetlb")
# All pods weigh as one process of the machine, where it has no other groups; so that engines come up beside
# whatever else runs: four times as much.
_SHARES, _WEIGHT = "4096", "400"


def make(name: str) -> None:
    """A kubelet refuses a parent group that is not there. Raises OSError where groups can't be written."""
    if not hierarchies():
        raise FileNotFoundError(f"there are no hierarchies at {ROOT}")
    for hierarchy in hierarchies():
        if is_version_2():
            offered = (hierarchy / "cgroup.controllers").read_text().split()
            wanted = " ".join(f"+{controller}" for controller in _CONTROLLERS if controller in offered)
            (hierarchy / "cgroup.subtree_control").write_text(wanted)
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
    """Remove the groups of what has ended; whether all of them are gone."""
    for hierarchy in hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            if itself or directory != str(hierarchy / name):
                with contextlib.suppress(OSError):  # something still ends in it
                    os.rmdir(directory)
    return not any((hierarchy / name).exists() for hierarchy in hierarchies())


def hierarchies() -> list[Path]:
    """Where groups can be made."""
    if is_version_2():
        return [ROOT]
    return [path for path in ROOT.iterdir() if not path.is_symlink() and (path / "cgroup.procs").exists()]


def is_version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def of_container(name: str, container_id: str, controller: str = "memory") -> Path:
    """The group of one container under the group ``name``. Raises FileNotFoundError when it has none."""
    top = ROOT / name if is_version_2() else ROOT / controller / name
    for path in top.rglob(f"*{container_id}*") if container_id else ():
        if path.is_dir():
            return path
    raise FileNotFoundError(f"no group of container {container_id!r} under {top}")


def is_empty(group: Path) -> bool:
    """Whether all of its processes have ended."""
    with contextlib.suppress(OSError):  # removed
        return not (group / "cgroup.procs").read_text()
    return True


def memory_limit(group: Path) -> int:
    """Bytes."""
    file = group / ("memory.max" if is_version_2() else "memory.limit_in_bytes")
    return int(file.read_text())


def memory_peak(group: Path) -> int:
    """The most bytes that were ever in use at once."""
    file = group / ("memory.peak" if is_version_2() else "memory.max_usage_in_bytes")
    return int(file.read_text())


def num_oom_kills(group: Path) -> int:
    """How many of its processes the kernel killed for memory."""
    text = (group / ("memory.events" if is_version_2() else "memory.oom_control")).read_text()
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])
