"""A pytest plugin: a test module fails when it leaves descriptors, threads, child processes or shared memory.

A suite of thousands of tests runs in one process. What one module leaves open makes an unrelated test fail
much later: ``select()`` refuses descriptors above 1,023, and a full /dev/shm stops every sidecar. The check
runs when the last test of a module has been torn down, because fixtures of a module live until then. What
fixtures of the session open is exempt.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PATIENCE_SECONDS = 10.0
"""How long threads and children that were asked to end may take."""

_shared_memory: set[str] = set()
"""Folders in /dev/shm that this process made. Other processes, such as other test runs, make some as well."""

_KEPT_THREADS = ("MainThread", "tqdm", "pydevd", "pytest_timeout", "asyncio_")
"""Prefixes of the names of threads that libraries keep for the life of a process."""
_LAUNCHER = "setpriv --pdeathsig KILL -- "
"""How ``testing.kube.process`` starts a program: the same process is both, one after the other."""
_COUNTED = ("socket:", "pipe:", "/dev/shm/", "/tmp/")
"""Prefixes of descriptors that are counted. Libraries keep others: /dev/null, and the epoll and eventfd
descriptors of ZeroMQ's contexts in vLLM. An event loop that is not closed leaves sockets as well."""


class Resources(NamedTuple):
    """What this process holds. Each entry is readable; equal entries are counted."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    shared_memory: Counter[str]

    @classmethod
    def held(cls) -> Resources:
        """Look at /proc and /dev/shm."""
        return cls(
            Counter(filter(lambda target: target.startswith(_COUNTED), _descriptors())),
            Counter(
                f"{t.name} ({t.ident})" for t in threading.enumerate() if not t.name.startswith(_KEPT_THREADS)
            ),
            Counter(_children()),
            Counter(filter(os.path.exists, _shared_memory)),
        )

    def beyond(self, other: Resources) -> dict[str, list[str]]:
        """Return what is here and not in ``other``, by kind."""
        left = {kind: list((ours - getattr(other, kind)).elements()) for kind, ours in self._asdict().items()}
        return {kind: entries for kind, entries in left.items() if entries}

    def plus(self, more: dict[str, list[str]]) -> Resources:
        """Return these and ``more``."""
        return Resources(*(ours + Counter(more.get(kind, ())) for kind, ours in self._asdict().items()))

    def with_at_least(self, other: Resources) -> Resources:
        """Return the larger one of each count."""
        return Resources(*(ours | theirs for ours, theirs in zip(self, other, strict=True)))


_lasting = Resources(Counter(), Counter(), Counter(), Counter())
"""What fixtures of the session opened, and what ``lasting`` contexts opened."""


@contextmanager
def lasting() -> Generator[None]:
    """Allow what is opened in this context until the process ends."""
    global _lasting
    before = Resources.held()
    try:
        yield
    finally:
        _lasting = _lasting.plus(Resources.held().beyond(before))


class LeakGuard:
    """The plugin. One module's tests run without those of another between them."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        resource_tracker.ensure_running()  # multiprocessing's own child, for the life of the process
        self._allowed = Resources.held()
        self._module: object = None
        self._has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Allow what a fixture of the session opens."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        with lasting():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what is held before the first test of a module."""
        if _module_of(item) is not self._module:
            self._module, self._has_failed = _module_of(item), False
            self._allowed = Resources.held()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a module has failed: its frames are kept, and these keep what its tests opened."""
        self._has_failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Check after the last test of a module, when its fixtures have been torn down."""
        result = yield
        if nextitem is None or _module_of(nextitem) is not _module_of(item):
            getattr(item, "funcargs", {}).clear()  # pytest forgets these values only after this hook
            # A server of the session may have been down before: one test stopped it, the next one starts it.
            left = what_is_left(self._allowed.with_at_least(_lasting), self._patience_seconds)
            if left and not self._has_failed:
                pytest.fail(f"{item.path.name} leaves behind: {describe(left)}", pytrace=False)
        return result


def what_is_left(allowed: Resources, patience_seconds: float) -> dict[str, list[str]]:
    """Return what is held beyond ``allowed`` after a wait for what is about to end; empty: nothing."""
    deadline = time.monotonic() + patience_seconds
    if not (left := Resources.held().beyond(allowed)):
        return left
    gc.collect()  # a cycle may hold a client of redis-py and its socket
    while (left := Resources.held().beyond(allowed)) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return left


def describe(left: dict[str, list[str]]) -> str:
    """Write ``left`` for people."""
    return "; ".join(
        f"{len(entries)} {kind}: {', '.join(e[:90] for e in entries[:8])}" for kind, entries in left.items()
    )


def _descriptors() -> Generator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue


def _children() -> Generator[str]:
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
                # Without the pid: a test may start a program of the session anew.
                yield command.decode().removeprefix(_LAUNCHER)
            except OSError:
                continue


def _note_folder(event: str, args: tuple[Any, ...]) -> None:
    if event == "tempfile.mkdtemp" and str(args[0]).startswith("/dev/shm/"):
        _shared_memory.add(str(args[0]))


def _module_of(item: pytest.Item) -> object:
    return item.getparent(pytest.Module)


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard on systems with a /proc."""
    install(config)


def install(config: pytest.Config, **options: float) -> None:
    """Register a guard with ``options`` of ``LeakGuard``."""
    if Path("/proc/self/fd").is_dir():
        sys.addaudithook(_note_folder)
        config.pluginmanager.register(LeakGuard(**options), "leak-guard")
