"""Pin processes to cores, and read how much processor time they use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USER_TICKS, _SYSTEM_TICKS = 11, 12
"""Positions in ``/proc/PID/stat`` after the command, whose name may contain spaces."""


class NotPinnedError(Exception):
    """A thread may run on a core that is forbidden to its process."""


def two_cores() -> tuple[int, int]:
    """Return the first two cores that this process may use. Raises RuntimeError if it has only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("two cores are needed: one for the engine, one for the sidecar and Redis")
    return cores[0], cores[1]


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants that still run."""
    pids = [pid]
    for parent in pids:  # the loop extends this list
        for task in _tasks(parent):
            with contextlib.suppress(FileNotFoundError):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                pids += map(int, children.split())
    return pids


def pin(pids: Iterable[int], cores: Collection[int]) -> None:
    """Restrict all present threads of these processes and of their descendants to ``cores``."""
    for task in _tasks_of_trees(pids):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(task, cores)


def check_pinned(pids: Iterable[int], cores: Collection[int]) -> None:
    """Raise NotPinnedError if a thread may run on other cores, for example a thread that started later."""
    for task in _tasks_of_trees(pids):
        with contextlib.suppress(ProcessLookupError):
            if not (allowed := os.sched_getaffinity(task)) <= set(cores):
                raise NotPinnedError(f"thread {task} may run on cores {allowed}, not on {set(cores)} alone")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that these processes and their descendants have used so far, in seconds."""
    return sum(_cpu_ticks(member) for pid in pids for member in process_tree(pid)) / _TICKS_PER_SECOND


def _cpu_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])


def _tasks_of_trees(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        for member in process_tree(pid):
            yield from _tasks(member)


def _tasks(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return []
