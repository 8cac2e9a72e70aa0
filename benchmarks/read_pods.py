"""Measure what a pod's requests lose while another pod reads its memory tier as fast as it can.

The engine and all its threads run on one core; the sidecar and the reader run on the other one. On a real
node the reader is on another machine. Here it has the lowest priority, so that it takes only what is left.

The cores share caches and memory, so any traffic slows the engine. The yardstick is a bare TCP connection
that sends memory as fast as it can, on the same core as the sidecar.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cores
from benchmarks.new_prompts import NICENESS, random_tokens
from benchmarks.report import Figure, at_most, of, paired
from benchmarks.vllm import ttft
from lmcache_store.tiers.base import ObjectId, RowKey
from lmcache_store.tiers.memory.layout import ArenaLayout, Head
from lmcache_store.tiers.memory.slots import ENTRY, SlotState
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Endpoint
from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess

PROMPT_TOKENS, NUM_PROMPTS, ROUNDS = 4096, 8, 40
_HEAD_BYTES = 4096
_BARE_BYTES, _PIECE_BYTES = 256 << 20, 1 << 20
_PATIENT_SECONDS = 10.0

_QUIET, _HIT, _NEW = "quiet", "memory hit", "new prompt"

Row = tuple[RowKey, int]


def stored_rows(arena: Path) -> list[Row]:
    """Return keys and payload bytes of all rows in an arena of one column."""
    data = np.memmap(arena, np.uint8, "r")
    head = Head.parse(bytes(data[:_HEAD_BYTES]))
    if head is None or head.geometry is None:
        raise RuntimeError(f"{arena} is not formatted: has an engine attached?")
    layout = ArenaLayout.plan(head.capacity_bytes, head.geometry)
    begin = layout.table_offset(0)
    entries = data[begin : begin + layout.num_rows * ENTRY.itemsize].view(ENTRY)
    stored = entries[entries["state"] == SlotState.COMMITTED]
    return [(bytes(entry["key"]), int(entry["length"])) for entry in stored]


class Traffic:
    """Another process, which moves bytes while it is active.

    ``move`` gets an event, which is set while the process may move bytes, their counter, and ``arguments``.
    """

    def __init__(self, move: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._is_active, self._num_bytes = context.Event(), context.Value("Q", 0)
        self._process = context.Process(
            target=move, args=(self._is_active, self._num_bytes, *arguments), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def num_bytes(self) -> int:
        """Bytes moved so far."""
        return int(self._num_bytes.value)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move bytes until the context ends."""
        before = self.num_bytes
        self._is_active.set()
        try:
            wait_until(lambda: self.num_bytes > before, what="bytes move")
            yield
        finally:
            self._is_active.clear()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _send(is_active: Any, num_bytes: Any) -> None:
    """Send memory over a bare connection of this process to itself."""
    data, into = memoryview(bytearray(_BARE_BYTES)), memoryview(bytearray(_PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()

    def receive() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while received := client.recv_into(into, 0, socket.MSG_WAITALL):
            num_bytes.value += received

    threading.Thread(target=receive, daemon=True).start()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    for start in itertools.cycle(range(0, _BARE_BYTES, _PIECE_BYTES)):
        is_active.wait()
        server.sendall(data[start : start + _PIECE_BYTES])


def _read(is_active: Any, num_bytes: Any, port: int, password: str, rows: list[Row]) -> None:
    """Read rows of a pod over and over."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    tier = PeersTier(
        [peer := Endpoint("127.0.0.1", port)],
        prefix=DEFAULT_PREFIX,
        password=lambda: password,
        timeout_seconds=_PATIENT_SECONDS,
        ask_seconds=_PATIENT_SECONDS,
    )
    into = memoryview(bytearray(max(length for _, length in rows)))
    while True:
        for key, _ in rows:
            is_active.wait()
            tier.note_offer(key, 1, peer)
            if (loaded := tier.load(ObjectId(key, 0), into)) is not None:
                num_bytes.value += loaded.length


@dataclass
class _Samples:
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Times to the first token, by kind of request and of traffic."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Bytes per second, by kind of traffic."""


def figures() -> list[Figure]:
    """Measure, and return the figures."""
    engine_core, cache_core = cores.two_cores()
    samples = _Samples()
    with tempfile.TemporaryDirectory() as folder:
        password = Path(folder) / "password"
        password.write_text("benchmark")
        with (
            SidecarProcess(
                memory_size="1Gi", peer_host="127.0.0.1", peer_port=0, peer_password_file=password
            ) as sidecar,
            EngineProcess(
                Path(folder) / "engine", connector_config(sidecar.socket_path), {"OMP_NUM_THREADS": "1"},
                enable_prefix_caching=False,
            ) as engine,
        ):  # fmt: skip
            engine.wait_ready().stop_hashing_kv()
            prompts = [random_tokens(seed, PROMPT_TOKENS) for seed in range(NUM_PROMPTS)]
            for tokens in prompts:
                ttft(engine, tokens)
            ttft(engine, prompts[0], is_hit=True)  # starts all threads
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
            rows = stored_rows(sidecar.arena_path)
            traffic = {"peer": Traffic(_read, _port(sidecar), "benchmark", rows), "bare": Traffic(_send)}
            caches = [sidecar.pid, *(each.pid for each in traffic.values())]
            try:
                for each in traffic.values():
                    with each.active():  # starts all threads
                        cores.pin(caches, [cache_core])
                cores.pin([engine.pid], [engine_core])
                _measure(engine, traffic, prompts, samples)
                cores.check_pinned([engine.pid], [engine_core])
                cores.check_pinned(caches, [cache_core])
            finally:
                for each in traffic.values():
                    each.close()
    return list(_figures(samples))


def _port(sidecar: SidecarProcess) -> int:
    (line,) = (line for line in sidecar.log.splitlines() if "can read this memory tier on port" in line)
    return int(line.rsplit(" ", 1)[1])


def _measure(
    engine: EngineProcess, traffic: Mapping[str, Traffic], prompts: list[list[int]], samples: _Samples
) -> None:
    for number in range(ROUNDS):
        for turn, kind in enumerate(random.sample([_QUIET, *traffic], 1 + len(traffic))):
            new = random_tokens(1_000_000 + 10 * number + turn, PROMPT_TOKENS // 4)
            with traffic[kind].active() if kind in traffic else nullcontext():
                began, before = time.monotonic(), _moved(traffic, kind)
                for name, tokens, is_hit in (
                    (_HIT, prompts[number % NUM_PROMPTS], True),
                    (_NEW, new, False),
                ):
                    samples.seconds.setdefault((name, kind), []).append(ttft(engine, tokens, is_hit=is_hit))
                rate = (_moved(traffic, kind) - before) / (time.monotonic() - began)
                samples.rates.setdefault(kind, []).append(rate)


def _moved(traffic: Mapping[str, Traffic], kind: str) -> int:
    return traffic[kind].num_bytes if kind in traffic else 0


def _figures(samples: _Samples) -> Iterator[Figure]:
    for name in (_HIT, _NEW):
        quiet = samples.seconds[name, _QUIET]
        yield at_most(
            f"time to first token while a peer reads, {name}",
            paired(samples.seconds[name, "peer"], quiet),
            "x",
            1.03,
        )
        yield of("    while a bare connection sends", paired(samples.seconds[name, "bare"], quiet), "x")
    for kind, what in {"peer": "peer", "bare": "bare connection"}.items():
        yield of(f"    rate of the {what} meanwhile", statistics.median(samples.rates[kind]) / 1e9, "GB/s")
