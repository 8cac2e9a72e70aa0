"""A pytest plugin: a test module fails if it leaves descriptors, threads, child processes or shared memory
open.

A suite of thousands of tests runs in one process. A leak of one module makes an unrelated test fail much
later: ``select()`` refuses descriptors above 1,023, and a full /dev/shm stops every sidecar. The check runs
after the last test of a module has been torn down, because fixtures of a module live until then. The message
names the tests that opened the resources: the guard compares resources after each test. This takes 0.1 to
0.9 ms, which depends on the number of descriptors and threads. Resources of session fixtures are exempt.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testing.engine import fork_server

PATIENCE_SECONDS = 10.0
"""Time that threads and children have to end."""

MAX_DESCRIPTORS = 900
"""Largest number of descriptors of this process after a module, of any kind: ``select()`` ends at 1,024."""

_SHM = "/dev/shm/"
_shared_memory: set[str] = set()
"""Files and folders in /dev/shm that this process created or mapped. Other processes create some as well."""

_LIBRARY_THREADS = ("MainThread", "tqdm", "pydevd", "pytest_timeout", "asyncio_")
"""Name prefixes of threads that libraries run until the process ends."""
_LAUNCHER = "setpriv --pdeathsig KILL -- "
"""How ``testing.kube.process`` starts a program: one process runs the launcher and then the program."""
_COUNTED = ("socket:", "pipe:", "/memfd:", "/dev/shm/", f"{os.path.realpath(tempfile.gettempdir())}/")
"""Prefixes of descriptors that are counted. Libraries hold others: /dev/null, and the epoll and eventfd
descriptors of ZeroMQ's contexts in vLLM. An event loop that is not closed leaves sockets, too."""
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
_PACKAGES = tuple(f"{os.path.realpath(folder)}/" for folder in (Path(__file__).parents[2], sys.prefix))
"""The checkout and the installed packages. Libraries hold their files, such as fonts of matplotlib. Both
folders may be temporary."""


class Resources(NamedTuple):
    """Resources of this process. Entries are readable, and equal entries are counted."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    shared_memory: Counter[str]

    @classmethod
    def held(cls) -> Resources:
        """Read the current resources from /proc and /dev/shm."""
        return cls(
            Counter(filter(_is_counted, _descriptors())),
            Counter(
                f"{t.name} ({t.ident})"
                for t in threading.enumerate()
                if not t.name.startswith(_LIBRARY_THREADS)
            ),
            Counter(_children()),
            Counter(filter(os.path.exists, tuple(_shared_memory))),  # threads may add some
        )

    def beyond(self, other: Resources) -> dict[str, list[str]]:
        """Return the entries that ``other`` lacks, by kind."""
        left = {
            kind: list((counts - getattr(other, kind)).elements()) for kind, counts in self._asdict().items()
        }
        return {kind: entries for kind, entries in left.items() if entries}

    def plus(self, more: dict[str, list[str]]) -> Resources:
        """Return the sum of these and ``more``."""
        return Resources(*(counts + Counter(more.get(kind, ())) for kind, counts in self._asdict().items()))

    def with_at_least(self, other: Resources) -> Resources:
        """Return the larger of each count."""
        return Resources(*(counts | added for counts, added in zip(self, other, strict=True)))


_lasting = Resources(Counter(), Counter(), Counter(), Counter())
"""Resources of session fixtures and of ``lasting`` contexts."""


@contextmanager
def lasting() -> Generator[None]:
    """Allow resources opened in this context until the process ends."""
    global _lasting
    held_before = Resources.held()
    try:
        yield
    finally:
        _lasting = _lasting.plus(Resources.held().beyond(held_before))


class Openers:
    """Names of the tests during which the present resources of this process were opened."""

    def __init__(self) -> None:
        self._held = Resources.held()
        self._names: dict[tuple[str, str], list[str]] = {}

    def record(self, name: str) -> None:
        """Record new resources as those of the test ``name``, and forget resources that no longer exist."""
        held = Resources.held()
        new = held.beyond(self._held)
        for kind, entries in self._held.beyond(held).items():
            for entry in entries:
                self._names.pop((kind, entry), None)
        for kind, entries in new.items():
            for entry in dict.fromkeys(entries):
                self._names.setdefault((kind, entry), []).append(name)
        self._held = held

    def describe(self, left: dict[str, list[str]]) -> str:
        """Format ``left`` for people."""
        return "; ".join(
            f"{len(entries)} {kind}: {', '.join(self._describe(kind, entry) for entry in entries[:8])}"
            for kind, entries in left.items()
        )

    def _describe(self, kind: str, entry: str) -> str:
        names = self._names.get((kind, entry), [])
        return f"{entry[:90]} (opened during {' or '.join(names[:8])})" if names else entry[:90]


class LeakGuard:
    """The plugin. It relies on the tests of one module running in a row."""

    def __init__(
        self, patience_seconds: float = PATIENCE_SECONDS, max_descriptors: float = MAX_DESCRIPTORS
    ) -> None:
        self._patience_seconds, self._max_descriptors = patience_seconds, max_descriptors
        resource_tracker.ensure_running()  # a child of multiprocessing that lives as long as the process
        self._allowed = Resources.held()
        self._openers = Openers()
        self._module: object = None
        self._failed: set[str] = set()  # tests of the module that failed
        self._is_full = False  # the process had too many descriptors before the module

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Allow resources that a session fixture opens."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        with lasting():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record the resources before the first test of a module."""
        if _module_of(item) is not self._module:
            self._module, self._failed = _module_of(item), set()
            self._allowed, self._is_full = Resources.held(), self._num_descriptors() > self._max_descriptors
            self._openers = Openers()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record whether a test has failed: pytest keeps its frames, and they hold what the test opened."""
        report = yield
        if report.failed:
            self._failed.add(item.nodeid)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Record what the test opened. Check after the last test of a module, and after its fixtures."""
        result = yield
        self._openers.record(item.name)
        if nextitem is None or _module_of(nextitem) is not _module_of(item):
            getattr(item, "funcargs", {}).clear()  # pytest drops these values only after this hook
            # A session's server may have been down before: one test stopped it, and the next one starts it.
            left = remaining_after(self._allowed.with_at_least(_lasting), self._patience_seconds)
            if left and not self._failed:
                pytest.fail(f"{item.path.name} leaves behind: {self._openers.describe(left)}", pytrace=False)
            self._check_number(item.path.name)
        return result

    def _check_number(self, module: str) -> None:
        """Fail the module after which the process has too many descriptors, also of kinds not counted."""
        if not self._is_full and (number := self._num_descriptors()) > self._max_descriptors:
            kinds = Counter(target.partition("[")[0] for target in _descriptors()).most_common(8)
            pytest.fail(
                f"the process has {number} descriptors after {module}, the limit is {self._max_descriptors}:"
                f" {', '.join(f'{count} {kind}' for kind, count in kinds)}",
                pytrace=False,
            )

    @staticmethod
    def _num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))


def remaining_after(allowed: Resources, patience_seconds: float) -> dict[str, list[str]]:
    """Wait for resources that are about to end, and return those beyond ``allowed``."""
    deadline = time.monotonic() + patience_seconds
    left = _held_beyond(allowed)
    while left:
        # A reference cycle may hold a client of redis-py and its socket, also of a thread that just ended.
        gc.collect()
        left = _held_beyond(allowed)
        if time.monotonic() > deadline:
            break
        threading.Event().wait(0.05 if left else 0)
    return left


def _held_beyond(allowed: Resources) -> dict[str, list[str]]:
    """Return resources beyond ``allowed``, without connections that others made to its listeners.

    vLLM's process groups listen on 15 ports that the kernel chose. A client of a server that has ended may
    dial one of them, and gloo never closes a connection.
    """
    left = Resources.held().beyond(allowed)
    if "descriptors" in left:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        listeners = {
            row[1] for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in allowed.descriptors
        }
        accepted = {f"socket:[{row[9]}]" for row in rows if row[1] in listeners}
        left["descriptors"] = [entry for entry in left["descriptors"] if entry not in accepted]
    return {kind: entries for kind, entries in left.items() if entries}


def _descriptors() -> Generator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue


def _is_counted(target: str) -> bool:
    return target.startswith(_COUNTED) and not target.startswith(_PACKAGES)


def _children() -> Generator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:
                pids = file.read().decode().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            try:
                # Without the pid: a test may restart a program of the session.
                yield _command(Path("/proc", pid)).removeprefix(_LAUNCHER)
            except OSError:
                continue


def _command(process: Path) -> str:
    """Return the command line of a process. Empty if the process has ended and is not yet reaped."""
    while True:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        if command or state == "Z":
            return command
        # Between two programs, the next command line is not set yet.
        time.sleep(0.001)  # real time: polls


def _note_shared_memory(event: str, args: tuple[Any, ...]) -> None:
    """Note what this process creates in /dev/shm, and segments of ``multiprocessing`` that it maps."""
    path: object = None
    if event == "tempfile.mkdtemp" or (event == "open" and args[2] & os.O_CREAT):
        path = args[0]
    elif event == "mmap.__new__" and args[0] >= 0:  # shm_open reports no event of its own
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{args[0]}")
    # A file in a folder belongs to the process that made the folder.
    if isinstance(path, str) and os.path.dirname(path) == _SHM.rstrip("/"):
        _shared_memory.add(path)


def _module_of(item: pytest.Item) -> object:
    return item.getparent(pytest.Module)


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard on systems with a /proc."""
    install(config)


def install(config: pytest.Config, **options: float) -> None:
    """Register a guard with these options of ``LeakGuard``."""
    if Path("/proc/self/fd").is_dir():
        sys.addaudithook(_note_shared_memory)
        fork_server.around_start = lasting
        config.pluginmanager.register(LeakGuard(**options), "leak-guard")
