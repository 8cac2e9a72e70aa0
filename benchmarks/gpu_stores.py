"""Measure the processor time of stores in the engine's process, if the sidecar copies and if the engine does.

Each round stores the same number of bytes. On a GPU, the copies cost no processor time. Here, a thread of the
simulated driver copies in the calling process, so the engine's time includes the copies. The report also has
figures without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import Report, at_most, of, paired
from lmcache.cuda.driver import Device
from lmcache.engines.core.copier_choice import make_copier
from lmcache.engines.core.cuda_copier import CudaCopier
from lmcache.engines.core.jobs import EngineIdentity, GroupStore, StepMeta, StoreJob
from lmcache.engines.core.layout import Layout
from lmcache.engines.core.worker import WorkerSide
from lmcache.kv_groups import KVGroup
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.hello import ClientHello, Role
from testing import cuda
from testing.child_process import wait_until
from testing.engine import simulated_gpu
from testing.processes import SidecarProcess

CHUNKS, LAYERS, BLOCKS_PER_CHUNK, PAGE_BYTES, NUM_BLOCKS = 8, 32, 16, 16 << 10, 256
ARENA_BYTES = 1 << 30
ROUNDS = 21
ALLOWED_PERCENT = 20


class Cost(NamedTuple):
    """CPU seconds of one store."""

    hooks: float
    """Time of the hooks on the engine's model thread."""
    storer: float
    """Time of the thread that stores."""
    process: float
    """Time of all threads, including those of gRPC and of the simulated driver."""


class Engine:
    """Worker side of the connector, with its KV on the simulated GPU."""

    def __init__(self, sidecar: SidecarProcess, *, is_copied_for: bool) -> None:
        context = Device.visible()[0].primary_context()
        kv = simulated_gpu.zeros(context, LAYERS * NUM_BLOCKS * PAGE_BYTES, torch.uint8)
        layout = Layout(tuple(kv.view(LAYERS, NUM_BLOCKS, PAGE_BYTES)), BLOCKS_PER_CHUNK)
        copier = make_copier({0: layout})
        hello = ClientHello(
            Role.WORKER,
            os.urandom(16),
            b"n" * 32,
            256,
            (KVGroup(0, 256 // BLOCKS_PER_CHUNK, layout.row_bytes),),
            transfer=copier.offer(),
        )
        self.client = SidecarClient(sidecar.socket_path, hello, on_rows=copier.prepare)
        self.client.start()
        self.worker = WorkerSide(lambda _: (self.client, copier, EngineIdentity(hello, 16)))
        self.worker.register_kv_caches({})
        self._numbers = iter(range(1, 1 << 30))
        wait_until(
            lambda: (session := self.client.session) and session.store_copier.is_sidecar == is_copied_for,
            timeout=60,
            what="attached",
        )
        assert isinstance(copier, CudaCopier)
        wait_until(
            lambda: copier.pins is not None and copier.pins.pinned_bytes > 0.9 * ARENA_BYTES,
            timeout=60,
            what="all of the arena is ready",
        )

    def store(self) -> Cost:
        """Run one step that stores ``CHUNKS`` new chunks of scattered blocks, and wait for its end."""
        number = next(self._numbers)
        keys = b"".join(b"n" * 32 + os.urandom(32) for _ in range(CHUNKS))
        blocks = np.random.default_rng(number).permutation(NUM_BLOCKS)[: CHUNKS * BLOCKS_PER_CHUNK]
        step = StepMeta(
            stores=[StoreJob(number, f"r{number}", (GroupStore(0, 0, keys, tuple(blocks.tolist())),))]
        )
        storer_before = self.worker._storer.submit(time.thread_time).result()
        process_before, hooks_before = time.process_time(), time.thread_time()
        self.worker.start_stores(step)
        hooks = time.thread_time() - hooks_before
        self.worker._stores[number].ended.wait(60)
        process = time.process_time() - process_before
        storer = self.worker._storer.submit(time.thread_time).result() - storer_before
        hooks_before = time.thread_time()
        self.worker.collect(step)
        hooks += time.thread_time() - hooks_before
        assert self.client.session is not None
        hits = self.client.session.index.find(np.frombuffer(keys, "<u8").reshape(CHUNKS, -1))
        assert len(hits.rows) == CHUNKS, "some chunks were not stored"
        return Cost(hooks, storer, process)


def child() -> None:
    costs: dict[str, list[Cost]] = {"CudaIPC": [], "SharedMemory": []}
    with (
        SidecarProcess(memory_size=ARENA_BYTES, transfer="CudaIPC") as reading,
        SidecarProcess(memory_size=ARENA_BYTES, transfer="SharedMemory") as idle,
    ):
        engines = {
            "CudaIPC": Engine(reading, is_copied_for=True),
            "SharedMemory": Engine(idle, is_copied_for=False),
        }
        for turn in range(ROUNDS + 3):
            for name, engine in engines.items():
                cost = engine.store()
                if turn >= 3:
                    costs[name].append(cost)
        for engine in engines.values():
            engine.worker.close()
    print(json.dumps(costs))


def run() -> Report:
    with cuda.node() as node:
        argv = [sys.executable, "-c", "from benchmarks.gpu_stores import child; child()"]
        environment = os.environ | node.environment(memory=4 << 30)
        done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, check=True)
    costs: dict[str, Any] = json.loads(done.stdout)
    by_sidecar, by_engine = ([Cost(*each) for each in costs[name]] for name in ("CudaIPC", "SharedMemory"))
    ours = [cost.hooks + cost.storer for cost in by_sidecar]
    whole = [cost.process for cost in by_engine]
    middle = ROUNDS // 2
    figures = [
        at_most(
            "engine's threads, sidecar copies / engine copies", paired(ours, whole), "%", ALLOWED_PERCENT
        ),
        of("the process, sidecar copies", 1e3 * sorted(cost.process for cost in by_sidecar)[middle], "ms"),
        of("the process, engine copies", 1e3 * sorted(whole)[middle], "ms"),
    ]
    for name, all_costs in ("sidecar", by_sidecar), ("engine", by_engine):
        hooks, storer = (sorted(column)[middle] for column in list(zip(*all_costs, strict=True))[:2])
        figures.append(of(f"hooks on the model thread, {name} copies", 1e3 * hooks, "ms"))
        figures.append(of(f"the storing thread, {name} copies", 1e3 * storer, "ms"))
    size = CHUNKS * LAYERS * BLOCKS_PER_CHUNK * PAGE_BYTES >> 20
    return Report(
        "gpu_stores", f"CPU time of a store of {CHUNKS} chunks, {size} MiB; {ROUNDS} rounds in turns", figures
    )
