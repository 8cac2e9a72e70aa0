"""Another process that uses the GPU: functions that run there, and a way to run them."""

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

from lmcache.cuda import ipc
from lmcache.cuda.copies import CopyBatch
from lmcache.cuda.driver import Device, Stream
from testing.cuda_memory import allocate

TIMEOUT = 200.0


class Peer:
    """A process that answers ``call``s of functions which take its state, a dictionary, first."""

    def __init__(self, connection: Connection, process: Any) -> None:
        self._connection, self.process = connection, process

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Don't wait for what it returns: ask for the ``result``."""
        self._connection.send((function, arguments))

    def result(self) -> Any:
        assert self._connection.poll(TIMEOUT), "what the other process was told to do does not end"
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
    """Its environment has ``environment``, too. Killed at the end."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    before = os.environ.copy()
    os.environ.update(environment)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        yield Peer(ours, process)
    finally:
        process.kill()
        process.join()
        ours.close()


# ---- what peers do ----


def open_context(state: dict[str, Any]) -> int:
    state["context"] = Device.visible()[0].primary_context()
    state["mappings"] = ipc.Mappings(state["context"])
    state["stream"] = Stream(state["context"])
    return os.getpid()


def export_content(state: dict[str, Any], data: bytes, offset: int = 0) -> ipc.Exported:
    """Allocate, and export the address ``offset`` bytes into it."""
    state["address"] = allocate(state["context"], data)
    return ipc.export(state["context"], state["address"] + offset)


def free(state: dict[str, Any]) -> None:
    state["context"].call("cuMemFree", state["address"])


def read(state: dict[str, Any], handle: bytes, offset: int, num_bytes: int) -> bytes:
    """Open, copy, close."""
    mapping = state["mappings"].open(handle)
    out = (ctypes.c_char * num_bytes)()
    try:
        places = ([ctypes.addressof(out)], [mapping.base + offset], [num_bytes])
        CopyBatch(*(np.array(words, np.uint64) for words in places)).submit(state["stream"])
        state["stream"].synchronize()
    finally:
        mapping.close()
    return out.raw
