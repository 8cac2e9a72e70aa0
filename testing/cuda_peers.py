"""Another process that uses the GPU: functions for it, and a way to call them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lmcache_client.cuda import ipc
from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import Device, GpuStream
from testing.cuda_memory import allocate

TIMEOUT = 200.0


class Peer:
    """A process that runs functions. Their first argument is its state, a dictionary."""

    def __init__(self, connection: Connection, process: Any) -> None:
        self._connection, self.process = connection, process

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a call without waiting. ``result`` returns its result."""
        self._connection.send((function, arguments))

    @property
    def has_result(self) -> bool:
        """True if the call of ``start`` has ended, or the process has."""
        return self._connection.poll(0)

    def result(self) -> Any:
        assert self._connection.poll(TIMEOUT), "the call in the other process does not end"
        error, result = self._connection.recv()
        assert error is None, error
        return result


def _serve(connection: Connection) -> None:
    state: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            answer: tuple[str | None, Any]
            try:
                answer = None, function(state, *arguments)
            except Exception:
                answer = traceback.format_exc(), None
            connection.send(answer)


@contextlib.contextmanager
def peer(**environment: str) -> Iterator[Peer]:
    """A peer with these environment variables in addition. It is killed at the end."""
    parent_end, child_end = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_serve, args=(child_end,), daemon=True)
    environment_before = os.environ.copy()
    os.environ.update(environment)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(environment_before)
    child_end.close()
    try:
        yield Peer(parent_end, process)
    finally:
        process.kill()
        process.join()
        parent_end.close()


# ---- functions for peers ----


def open_context(state: dict[str, Any]) -> int:
    state["context"] = Device.visible()[0].primary_context()
    state["mappings"] = ipc.Mappings(state["context"])
    state["stream"] = GpuStream(state["context"])
    return os.getpid()


def export_content(state: dict[str, Any], data: bytes, offset: int = 0) -> ipc.Exported:
    """Allocate memory and export the address ``offset`` bytes into it."""
    state["address"] = allocate(state["context"], data)
    return ipc.export(state["context"], state["address"] + offset)


def free(state: dict[str, Any]) -> None:
    state["context"].call("cuMemFree", state["address"])


def read(state: dict[str, Any], handle: bytes, offset: int, num_bytes: int) -> bytes:
    """Open the handle, copy bytes from it, and close it."""
    mapping = state["mappings"].open(handle)
    out = (ctypes.c_char * num_bytes)()
    try:
        arguments = ([ctypes.addressof(out)], [mapping.base + offset], [num_bytes])
        batch = CopyBatch(*(np.array(words, np.uint64) for words in arguments))
        batch.submit(state["stream"], is_pinned=False)
        state["stream"].synchronize()
    finally:
        mapping.close()
    return out.raw
