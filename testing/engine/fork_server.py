"""Starts programs as copies of a process that has imported their modules: fork servers of
``multiprocessing``.

A test engine needs one second of processor time to become ready, and nine more to import vLLM. ``allowed()``
enables copies. Benchmarks, the demo and pods start programs as users do. ``start`` copies vLLM. Other
programs have a ``ForkServer`` of their own.
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

from lmcache_store.common.timing import TIMING
from testing import deadlines
from testing.engine import gpu
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
    """Let programs that start in this context be copies."""
    global _is_allowed
    _is_allowed = True
    try:
        yield
    finally:
        _is_allowed = False


def is_allowed() -> bool:
    return _is_allowed


class ForkServer:
    """A process that imports the modules of one kind of program, and its copies. The first copy starts it."""

    def __init__(
        self,
        imported: str,
        environment: Callable[[], Mapping[str, str]],
        *,
        shares_memory: bool = True,
    ) -> None:
        """Prepare a server without starting it.

        Args:
            imported: a module that imports the program's modules
            environment: returns the variables that the program reads when its modules are loaded
            shares_memory: whether copies share memory of ``multiprocessing`` with their children. Each copy
                then starts a process that removes this memory.
        """
        self._imported = imported
        self._environment = environment
        self._shares_memory = shares_memory
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
        options = (str(log), cwd, env, start_new_session, self._shares_memory)
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
            server.set_forkserver_preload([self._imported, __name__])
            # The interpreter, OpenMP and programs read some variables once, when they are loaded. With
            # another OMP_WAIT_POLICY, the threads of all engines would spin.
            variables = {**environment, **self._environment()}
            with around_start(), mock.patch.dict(os.environ, variables, clear=True):
                server.ensure_running()
            self._server = server
        return self._server


def _of_no_node() -> dict[str, str]:
    """Variables without the simulated driver of the first copy's node. It would not survive a fork."""
    return ENVIRONMENT | {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}


_engines = {
    None: ForkServer("testing.engine.imported", _of_no_node),
    gpu.EMULATED: ForkServer(
        "testing.vllm_gpu.imported", lambda: ENVIRONMENT | gpu.environment_of(gpu.EMULATED)
    ),
}
start = _engines[None].start


def of_engines(kind: str | None) -> ForkServer | None:
    """Return the server of engines on this kind of GPU (``testing.engine.gpu``), if there is one."""
    return _engines.get(kind)


def _run(
    module: str,
    ends: list[Connection],
    arguments: list[str],
    log: str,
    cwd: str,
    env: dict[str, str],
    start_new_session: bool,
    shares_memory: bool,
) -> None:
    """Run the program ``module`` until this process ends."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    _close_descriptors_of_multiprocessing()
    if shares_memory:
        resource_tracker.ensure_running()
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
    TIMING.read(os.environ.get(deadlines.VARIABLE, deadlines.STANDARD))
    sys.argv = [module, *map(str, descriptors), *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # end like an interpreter: a process of multiprocessing does not call atexit's functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _close_descriptors_of_multiprocessing() -> None:
    """Close the pipes to the program that asked for this copy, and to its resource tracker.

    The server would otherwise live as long as its last copy, and the tracker would report shared memory of
    this process after the last line of pytest. This process starts a tracker of its own when it needs one.
    """
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    parent: Any = multiprocessing.parent_process()
    for descriptor in (server._forkserver_alive_fd, tracker._fd, parent.sentinel):
        os.close(descriptor)
    server._forkserver_alive_fd = tracker._fd = tracker._pid = None
