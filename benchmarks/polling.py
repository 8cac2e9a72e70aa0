"""Measure the cost of polling many clusters: the operator's real poller, with simulated sidecars.

The simulated sidecars run in another process. Each pod looks up ``KEYS_PER_SECOND`` sampled keys of
conversations that continue. The poller reads each pod once a minute. The first polls do not count, because
they read the sidecars' whole rings.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web
from lmcache_operator.autoscaling.intake.poller import Poller
from lmcache_operator.components.base import Observed
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import SIDECAR
from lmcache_operator.stats import StatsClient

from benchmarks.report import Figure, Report, at_most
from lmcache.curves import HASHES
from testing.workloads.requests import row_hash

NUM_CLUSTERS, PODS = int(os.environ.get("NUM_CLUSTERS", "200")), 5
KEYS_PER_SECOND, KEYS_OF_A_REQUEST = 20.0, 10
ROW_BYTES, CHUNK_TOKENS = 32 << 20, 256
MEASURED_SECONDS = float(os.environ.get("SECONDS", "180"))
NUM_AT_ONCE = 1000


def run() -> Report:
    parent, child = multiprocessing.Pipe()
    fleet = multiprocessing.get_context("spawn").Process(target=serve_fleet, args=(child,), daemon=True)
    fleet.start()
    try:
        figures = asyncio.run(_measure(parent.recv()))
    finally:
        fleet.terminate()
        fleet.join()
    conditions = f"{NUM_CLUSTERS} LMCacheClusters of {PODS} pods, {KEYS_PER_SECOND:.0f} keys/s each"
    return Report("polling", conditions, figures)


class Pod:
    """Simulated sidecar. Each request belongs to a conversation, and has its keys from the first one on."""

    def __init__(self, name: int) -> None:
        self.name, self.chance = name, random.Random(name)
        self.started = self.reported_at = time.time()
        self.num_samples = 0

    def samples(self) -> dict[str, Any]:
        now = time.time()
        number = int((now - self.reported_at) * KEYS_PER_SECOND / KEYS_OF_A_REQUEST)
        first, begin = self.num_samples, self.reported_at
        self.num_samples += number * KEYS_OF_A_REQUEST
        if number:
            self.reported_at = now
        keys = []
        for _ in range(number):
            session = int(self.chance.paretovariate(0.8))
            keys += [row_hash(self.name, session, index) for index in range(KEYS_OF_A_REQUEST, 0, -1)]
        return {
            "version": 1, "now": now, "started": self.started, "namespace": "5f" * 32,
            "chunk_tokens": CHUNK_TOKENS, "row_bytes": ROW_BYTES, "below": HASHES, "since": first,
            "next": self.num_samples, "dropped": 0, "t0": begin,
            "ms": [int(1000 * (now - begin) * index / number) for index in range(number)],
            "num": [KEYS_OF_A_REQUEST] * number,
            "key": b"".join(key.to_bytes(8, "big") for key in keys).hex(), "tier": "-" * len(keys),
        }  # fmt: skip

    def stats(self) -> dict[str, Any]:
        tokens = self.num_samples * CHUNK_TOKENS
        lookups = {
            "lookup_tokens": tokens, "hit_tokens": {"memory": tokens // 2}, "gpus": 1,
            "prefill_tokens_per_second": 10_000, "kv_bytes_per_token": 131072, "engine_kv_bytes": 16 << 30,
        }  # fmt: skip
        return {"memory": {"size_bytes": 64 << 30}, "lookups": lookups}


def serve_fleet(pipe: Connection) -> None:
    """Serve all pods, each on its own address and all on the same port."""
    asyncio.run(_serve_fleet(pipe))


async def _serve_fleet(pipe: Connection) -> None:
    pods: dict[str, Pod] = {}

    async def answer(request: web.Request) -> web.Response:
        pod = pods.setdefault(request.host, Pod(len(pods)))
        reply = pod.stats() if request.path == "/stats" else pod.samples()
        return web.Response(body=json.dumps(reply).encode(), content_type="application/json")

    application = web.Application()
    application.router.add_get("/{name}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    port = 0
    for number in range(NUM_CLUSTERS):
        for pod in range(PODS):
            await web.TCPSite(runner, address(number, pod), port, backlog=64).start()
            port = runner.addresses[0][1]
    pipe.send(port)
    await asyncio.Event().wait()


def address(number: int, pod: int) -> str:
    """Return the address of a cluster's pod, on the loopback interface."""
    return f"127.{1 + number // 250}.{number % 250}.{pod + 1}"


def observed(number: int) -> dict[str, Observed]:
    pods = tuple(
        {
            "metadata": {"name": f"pod-{pod}", "uid": f"{number}-{pod}"},
            "spec": {"initContainers": [{"name": SIDECAR}]},
            "status": {
                "phase": "Running", "podIP": address(number, pod),
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for pod in range(PODS)
    )  # fmt: skip
    engine = {"metadata": {"uid": "set"}, "spec": {"replicas": PODS, "template": {"metadata": {}}}}
    spec = {
        "model": {"name": "org/model"},
        "engine": {"replicas": PODS, "gpu": {"count": 0}},
        "tiers": {"memory": {"size": "64Gi"}},
        "autoscaling": {"mode": "Auto", "memory": {"minSize": "16Gi", "maxSize": "512Gi"}},
    }
    metadata = {"name": f"c{number}", "namespace": "default", "uid": f"uid-{number}"}
    state = Observed(
        resource={"metadata": metadata, "spec": spec},
        children={Ref("StatefulSet", f"c{number}-engine"): engine},
        pods=pods,
        now=datetime.now(UTC),
    )
    return {component.name: state for component in COMPONENTS}


class Stalls:
    """Longest time, in processor time, in which the event loop ran a single task."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.thread_time() - start)
            await asyncio.sleep(0.001)


async def _measure(port: int) -> list[Figure]:
    stalls = Stalls()
    watching = asyncio.create_task(stalls.watch())
    async with StatsClient(port, seconds=5.0) as stats:
        poller = Poller(stats, lambda key: None)
        start, cpu_of_all = time.monotonic(), time.process_time()
        for number in range(NUM_CLUSTERS):
            poller.report(ClusterKey("default", f"c{number}", f"uid-{number}"), observed(number))
        await _until(lambda: all(watched.report for watched in poller._watched.values()))
        at_once, cpu_of_all = time.monotonic() - start, time.process_time() - cpu_of_all
        await asyncio.sleep(60.0)  # by now, the polls are spread over the minute
        stalls.longest, cpu, begin = 0.0, time.process_time(), time.monotonic()
        samples = _num_samples(poller)
        await asyncio.sleep(MEASURED_SECONDS)
        seconds = time.monotonic() - begin
        cpu = time.process_time() - cpu
        samples = _num_samples(poller) - samples
        silent = sum(
            pod.problem != ""
            for watched in poller._watched.values()
            for pod in watched.sizing.intake.pods.values()
        )
        state = max(len(watched.report.state) for watched in poller._watched.values() if watched.report)
        await poller.close()
    watching.cancel()
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    num_pods = NUM_CLUSTERS * PODS
    return [
        at_most(f"all {num_pods} pods due at once", at_once, "s", 10.0 * num_pods / NUM_AT_ONCE),
        Figure("processor time of that", cpu_of_all, "s"),
        at_most("processor", cpu / seconds, "cores", 0.5),
        at_most("memory, of the whole process", mebibytes, "MiB", 400.0),
        Figure("samples counted", samples / seconds, "per second"),
        Figure("processor, per sample", 1e6 * cpu / max(1, samples), "us"),
        at_most("longest stall of the event loop, processor time", 1000 * stalls.longest, "ms", 50.0),
        Figure("largest state", state / 1024, "KiB"),
        at_most("pods without a usable answer", silent, "", 0),
    ]


def _num_samples(poller: Poller) -> int:
    return sum(watched.sizing.intake.num_samples for watched in poller._watched.values())


async def _until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - no event exists
        await asyncio.sleep(0.02)
