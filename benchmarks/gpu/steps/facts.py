"""Facts about driver and host, and how processes share GPU memory: in namespaces, by users, after kills."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.results import Results, Section
from benchmarks.gpu.scale import Scale, size
from lmcache_client.cuda.copies import BATCHES_SINCE, CopyBatch
from lmcache_client.cuda.driver import Device, GpuContext, GpuStream
from lmcache_client.cuda.errors import CudaError
from testing.child_process import wait_readable, wait_until
from testing.cuda_memory import allocate, pages
from testing.cuda_peers import Peer, export_content, open_context, peer

_ANSWER_SECONDS = 20.0
"""Deadline of another process. A call that hangs is a result, too."""
_CONTENT_BYTES = 2 << 20
"""CUDA IPC shares the whole block of 2 MiB that contains a smaller allocation."""
_USER = 1234
_NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_CONTAINER = [*_NAMESPACES, "--ipc", "--mount"]
_PAGEABLE_BYTES = 1 << 20
_RIGHT, _WRONG = "right bytes", "**wrong bytes**"
NO_IPC = "the sidecar can't read this GPU's memory there: use --transfer SharedMemory"


def run(results: Results, scale: Scale) -> None:
    device = Device.visible()[0]
    _host(results, device)
    section = results.section(
        "What the driver does",
        ("case", "result", "expected"),
        "A second process opens GPU memory of a first one over CUDA IPC. Both are ended as crashes end them.",
    )
    Ipc(results, section).run()
    _calls_of_a_process(results, section)


def _host(results: Results, device: Device) -> None:
    """Write what the host offers."""
    section = results.section(
        "Host and driver", ("fact", "value"), "Versions, limits and devices of this host."
    )
    shared = os.statvfs("/dev/shm")
    facts = {
        "kernel": f"Linux {platform.release()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "cuda-bindings", "vllm", "transformers", "triton")},
        "driver": _nvidia_smi("driver_version"),
        "PCIe generation and width": _nvidia_smi("pcie.link.gen.current,pcie.link.width.current"),
        "compute mode, MIG mode": _nvidia_smi("compute_mode,mig.mode.current"),
        "devices": ", ".join(each.uuid.split("-")[0] for each in Device.visible()),
        "processes may share the GPU": str(device.attribute("COMPUTE_MODE") not in (2, 3)),
        "/dev/shm": size(shared.f_bavail * shared.f_frsize),
        "memory": size(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE),
        "NUMA nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        "locked memory (ulimit -l)": str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "user": str(os.getuid()),
    }
    for name, value in facts.items():
        section.add(name, value)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nvidia_smi(fields: str) -> str:
    if (program := shutil.which("nvidia-smi")) is None:
        return "no nvidia-smi"
    argv = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    return (
        subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip().replace("\n", "; ")
    )


class NoAnswerError(Exception):
    """Another process has ended or hangs."""


class Importer:
    """The process of ``benchmarks.gpu.importer``, started by a command that sets its conditions."""

    def __init__(self, prefix: Sequence[str] = (), uid: int = 0) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu.importer"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        try:
            self._send(uid)
            self.hello = self._receive()
        except NoAnswerError as error:
            raise RuntimeError(f"the process could not be started: {error}") from error

    def open(self, handle: bytes) -> dict[str, Any]:
        """Open memory, or read it again. Returns the code of the driver and the digest of the memory."""
        self._send({"handle": handle.hex()})
        return self._receive()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a request that was not read
                assert pipe is not None
                pipe.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer shows
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """Return the answer. Kills the process and raises NoAnswerError if there is none."""
        assert self._process.stdout is not None
        is_in_time = wait_readable(self._process.stdout.fileno(), _ANSWER_SECONDS)
        line = self._process.stdout.readline() if is_in_time else ""
        if not line:
            self.kill()
            raise NoAnswerError("it has ended" if is_in_time else f"no answer within {_ANSWER_SECONDS:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Ipc:
    """Cases of CUDA IPC. A case whose conditions this host can't give, is reported as such."""

    def __init__(self, results: Results, section: Section) -> None:
        self._results, self._section = results, section
        self._content = os.urandom(_CONTENT_BYTES)
        self._digest = hashlib.sha256(self._content).hexdigest()

    def run(self) -> None:
        with peer() as exporter:
            exporter.call(open_context)
            handle = exporter.call(export_content, self._content).handle
            self._case("another process", lambda: self._open(handle), "its bytes")
            self._case("the same process", lambda: exporter.call(open_in_exporter, handle), "error 201")
            self._case("own PID namespace", lambda: self._open(handle, _NAMESPACES), "its bytes")
            self._case(
                "own PID, IPC and mount namespace", lambda: self._open(handle, _CONTAINER), "its bytes"
            )
            self._case(f"user {_USER}", lambda: self._open(handle, uid=_USER), "its bytes")
            self._case("after an importer was killed", lambda: self._open_after_kill(handle), "its bytes")
            self._case("after the exporter was killed", lambda: self._kill(exporter, handle), "its bytes")

    def _case(self, what: str, work: Callable[[], str], expected: str) -> None:
        try:
            result = work()
        except (OSError, RuntimeError) as error:
            result = f"not possible here: {error}"
        except NoAnswerError as error:
            result = f"**{error}**"
        self._section.add(f"memory opened: {what}", result, expected)
        if result != expected and not result.startswith("not possible"):
            self._results.problem(f"memory opened: {what}: {result}, expected {expected}", NO_IPC)

    def _open(self, handle: bytes, prefix: Sequence[str] = (), uid: int = 0) -> str:
        importer = Importer(prefix, uid)
        try:
            return self._read(importer, handle)
        finally:
            importer.kill()

    def _read(self, importer: Importer, handle: bytes) -> str:
        answer = importer.open(handle)
        if answer["code"]:
            return f"error {answer['code']}"
        return "its bytes" if answer["digest"] == self._digest else _WRONG

    def _open_after_kill(self, handle: bytes) -> str:
        killed = Importer()
        killed.open(handle)
        killed.kill()
        return self._open(handle)

    def _kill(self, exporter: Peer, handle: bytes) -> str:
        importer = Importer()
        try:
            importer.open(handle)
            exporter.process.kill()
            exporter.process.join()
            return self._read(importer, handle)
        finally:
            importer.kill()


def open_in_exporter(state: dict[str, Any], handle: bytes) -> str:
    """Open memory of the same process. Returns the error of the driver."""
    try:
        state["mappings"].open(handle).close()
    except CudaError as error:
        return f"error {error.code}"
    return "opened"


def _calls_of_a_process(results: Results, section: Section) -> None:
    """Report calls of one process whose results decide what the engine's copier does."""
    for to_host in (True, False):
        way = "from the GPU to memory that is not pinned" if to_host else "from memory that is not pinned"
        single = _in_peer(copy_pageable, to_host, False)
        batch = _in_peer(copy_pageable, to_host, True)
        section.add(f"a single copy {way}", single, _RIGHT)
        section.add(f"a batch of copies {way}", batch, f"{_RIGHT} or an error")
        for what, result, is_bad in (("copy", single, single != _RIGHT), ("batch", batch, batch == _WRONG)):
            if is_bad:
                results.problem(f"a {what} {way}: {result}", "copies of KV may be wrong: send us the page")
    with peer() as other:
        other.call(open_context)
        section.add(
            f"pinning by user {_USER} with 64 KiB of locked memory", other.call(pin_as_user), "pinned"
        )


def _in_peer(function: Callable[..., str], *arguments: object) -> str:
    """Call a function in a process of its own, whose context it may break."""
    try:
        with peer() as other:
            other.call(open_context)
            other.start(function, *arguments)
            wait_until(lambda: other.has_result, timeout=_ANSWER_SECONDS, what="the call ends")
            return str(other.result())
    except (AssertionError, EOFError, OSError) as error:
        return f"**{(str(error) or 'the process has ended').splitlines()[-1]}**"


def copy_pageable(state: dict[str, Any], to_host: bool, is_batch: bool) -> str:
    """Copy memory that is not pinned. Returns whether the bytes are right, or the error."""
    context: GpuContext = state["context"]
    if is_batch and (context.driver.version < BATCHES_SINCE or not context.can_batch):
        return "no batches: the driver is too old, or this platform does not support them"
    try:
        return _copy_pageable(context, to_host=to_host, is_batch=is_batch)
    except CudaError as error:
        return f"error {error.code}"


def _copy_pageable(context: GpuContext, *, to_host: bool, is_batch: bool) -> str:
    host, stream = pages(_PAGEABLE_BYTES), GpuStream(context)
    content = os.urandom(_PAGEABLE_BYTES)
    address = allocate(context, content if to_host else bytes(_PAGEABLE_BYTES))
    if not to_host:
        host[:] = np.frombuffer(content, np.uint8)
    ends = [host.ctypes.data, address]
    to, from_ = ends if to_host else reversed(ends)
    words = (np.array([word], np.uint64) for word in (to, from_, _PAGEABLE_BYTES))
    # Declared as pinned, so that it is a batch for the driver.
    CopyBatch(*words).submit(stream, is_source_stable=not to_host, is_pinned=is_batch)
    stream.synchronize()
    got = np.zeros(_PAGEABLE_BYTES, np.uint8)
    context.call("cuMemcpyDtoH", got.ctypes.data, address, got.nbytes)
    result = host if to_host else got
    return _RIGHT if result.tobytes() == content else _WRONG


def pin_as_user(state: dict[str, Any]) -> str:
    """Pin memory in a process of another user with a small limit of locked memory."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    os.setuid(_USER)
    memory = pages(_PAGEABLE_BYTES)
    try:
        state["context"].call("cuMemHostRegister", memory.ctypes.data, memory.nbytes, 0)
    except CudaError as error:
        return f"error {error.code}"
    return "pinned"
