"""NUMA nodes of this host, and threads that run on the cores of one. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Run this thread, and those that it starts, on the cores of a NUMA node. New pages then lie on this node
    while it has memory.

    The seccomp profile of containers allows this, and forbids ``mbind``. Without effect if ``node`` is None,
    or if this process may use none of its cores.
    """
    cores = os.sched_getaffinity(0)
    near = cores & cores_of(node) if node is not None else set()
    try:
        _use(near)
        yield
    finally:
        _use(cores if near else set())


def _use(cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # the container has lost these cores, or none is wanted
        os.sched_setaffinity(0, cores)


def may_be_elsewhere(node: int) -> bool:
    """Return True if pages of this process may lie on another NUMA node, and ``on_node`` would avoid that."""
    cores = os.sched_getaffinity(0)
    return bool(cores & cores_of(node)) and not cores <= cores_of(node)


def nodes() -> list[int]:
    """Return the numbers of the nodes that have memory."""
    return _listed(_NODES / "has_memory")


def cores_of(node: int) -> set[int]:
    """Return the cores of a node; none if it does not exist."""
    return set(_listed(_NODES / f"node{node}" / "cpulist"))


def _listed(path: Path) -> list[int]:
    """Return the numbers in a list of the kernel, such as 0-3,8; none without the file."""
    try:
        listed = path.read_text().strip()
    except OSError:
        return []
    ranges = (part.partition("-") for part in listed.split(",") if part)
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
