"""Starts engines as copies of a process that has imported their modules: fork servers of ``multiprocessing``.

A test engine needs one second of processor time to become ready, and nine more to import vLLM. ``allowed()``
enables copies. Benchmarks, the demo and pods start engines as users do. ``start`` copies vLLM. Another engine
has a ``ForkServer`` of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from testing.engine.environment import ENVIRONMENT

around_start: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context in which the server starts. The leak guard of the tests lets the server live until the run ends."""

_context = multiprocessing.get_context("forkserver")
_lock = threading.Lock()
_is_allowed = False


class ForkedProcess:
    """A process that the server has started, with the parts of ``subprocess.Popen`` that tests use."""

    def __init__(self, process: Any) -> None:
        """Take over a started process of ``multiprocessing``."""
        self.pid: int = process.pid
        self._process = process
        self._exit_status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._exit_status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises TimeoutExpired after ``timeout`` seconds."""
        if self._exit_status is None:
            self._process.join(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._exit_status = self._process.exitcode
            self._process.close()
        return self._exit_status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def allowed() -> Iterator[None]:
    """Let engines that start in this context be copies."""
    global _is_allowed
    _is_allowed = True
    try:
        yield
    finally:
        _is_allowed = False


def is_allowed() -> bool:
    return _is_allowed


class ForkServer:
    """A process that imports the modules of one kind of engine, and its copies. The first copy starts it."""

    def __init__(self, imported: str, environment: Callable[[], Mapping[str, str]]) -> None:
        """``imported`` is a module that imports the engine's modules. ``environment`` returns the variables
        that the engine reads when its modules are loaded.
        """
        self._imported = imported
        self._environment = environment
        self._server: forkserver.ForkServer | None = None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        cwd: str,
        env: dict[str, str],
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Run ``python -m MODULE DESCRIPTOR... ARGUMENT...`` in a copy, with its output in ``log``.

        ``pass_fds`` are the descriptors. They have other numbers in the copy.
        """
        ends = [Connection(os.dup(descriptor)) for descriptor in pass_fds]
        options = (str(log), cwd, env, start_new_session)
        process = _context.Process(target=_run, args=(module, ends, list(arguments), *options))
        with _lock:
            connect = self._running(env).connect_to_new_process
            # A process of multiprocessing asks the one server of this module for a copy.
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
        for end in ends:
            end.close()
        return ForkedProcess(process)

    def _running(self, environment: Mapping[str, str]) -> forkserver.ForkServer:
        if self._server is None:
            server = forkserver.ForkServer()
            server.set_forkserver_preload([self._imported])
            # The interpreter, OpenMP and engines read some variables once, when they are loaded. With another
            # OMP_WAIT_POLICY, the threads of all engines would spin.
            variables = {**environment, **self._environment()}
            with around_start(), mock.patch.dict(os.environ, variables, clear=True):
                server.ensure_running()
            self._server = server
        return self._server


start = ForkServer("testing.engine.imported", lambda: ENVIRONMENT).start


def _run(
    module: str,
    ends: list[Connection],
    arguments: list[str],
    log: str,
    cwd: str,
    env: dict[str, str],
    start_new_session: bool,
) -> None:
    """Run the program ``module`` until this process ends."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    _change_resource_tracker()
    if start_new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # multiprocessing gives a copy the path of the process that asked for it.
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    descriptors = [os.dup(end.fileno()) for end in ends]
    for end in ends:
        end.close()
    sys.argv = [module, *map(str, descriptors), *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # end like an interpreter: a process of multiprocessing does not call atexit's functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _change_resource_tracker() -> None:
    """Start a process that removes shared memory left by this process and its children.

    The tracker that a copy inherits would report such memory after the last line of pytest.
    """
    tracker: Any = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    tracker.ensure_running()
