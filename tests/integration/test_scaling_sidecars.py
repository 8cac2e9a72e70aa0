"""Two real sidecars, what engines look up in them, and the operator's poller: a recommendation."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from typing import Any

import numpy as np
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Observed
from lmcache_operator.scaling.poller import Poller
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import SIDECAR
from lmcache_operator.stats import StatsClient

from lmcache.rpc.client import Role, Scheduled, Session
from lmcache.tiers.memory.contracts import Reserved
from testing.processes import SidecarProcess
from tests.harness.engine import session_of
from tests.harness.operator_model import cluster
from tests.harness.wire import make_keys

CHUNK_BYTES = 256 << 10
CHUNK_TOKENS = 256
PATIENCE = 120.0
KEY = ClusterKey("default", "demo", "uid")
NUM_DOCUMENTS, CHUNKS = 60, 8
"""Of each pod: 120 MiB of rows, where a pod has 64."""


def serve(scheduler: Session, worker: Session, request: str, chunks: list[int]) -> int:
    """Count what is in memory, and store the rest."""
    keys = make_keys(*chunks)
    found = len(scheduler.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).rows)
    told = Scheduled(num_hit_chunks=found, num_loaded_tokens=CHUNK_TOKENS * found)
    scheduler.lookup(request, [(0, keys)], hint=True, scheduled=told, prefill_tokens_per_second=10_000.0)
    missing = keys[64 * found :]
    reserved = worker.reserve(0, missing, request_id=request, first_chunk=found) if missing else []
    worker.commit([one.slot for one in reserved if one.result is Reserved.SLOT])
    return found


class ByPort:
    """Sidecars at one address each, and ports of their own."""

    def __init__(self, clients: Mapping[str, StatsClient]) -> None:
        self.clients = clients

    async def samples(self, address: str, question: Mapping[str, int]) -> Any:
        return await self.clients[address].samples("127.0.0.1", question)

    async def read(self, address: str) -> Any:
        return await self.clients[address].read("127.0.0.1")


def observed(addresses: list[str]) -> dict[str, Observed]:
    pods = tuple(
        {
            "metadata": {"name": f"pod-{address}", "uid": address},
            "spec": {"initContainers": [{"name": SIDECAR}]},
            "status": {
                "phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]
            },
        }
        for address in addresses
    )  # fmt: skip
    engine = {"metadata": {"uid": "set"}, "spec": {"replicas": len(pods), "template": {"metadata": {}}}}
    one = Observed(
        resource=cluster(tiers={"memory": {"size": "64Mi"}}, autoscaling={"memory": {"maxSize": "512Mi"}}),
        children={Ref("StatefulSet", "demo-engine"): engine},
        pods=pods,
        now=datetime.now(UTC),
    )
    return {own.name: one for own in COMPONENTS}


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (value := found()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    return value


async def recommended(processes: list[SidecarProcess], sessions: list[tuple[Session, Session]]) -> Any:
    """The report after an hour of five minutes each, and the share of rows that was hit in it."""
    now, hits, requests = [1.8e9], [0, 0], itertools.count()
    addresses = [str(process.http_port) for process in processes]
    async with AsyncExitStack() as stack:
        clients = {
            address: await stack.enter_async_context(StatsClient(int(address))) for address in addresses
        }
        poller = Poller(ByPort(clients), lambda key: None, clock=lambda: now[0], poll_seconds=0.01)
        stack.push_async_callback(poller.close)
        poller.report(KEY, observed(addresses))
        intake = poller._watched[KEY.uid].sizing.intake
        await until(lambda: len(intake.pods) == 2 and all(pod.started for pod in intake.pods.values()))
        for _ in range(12):
            now[0] += 300.0
            for pod, (scheduler, worker) in enumerate(sessions):
                for number in range(NUM_DOCUMENTS):
                    first = 1_000_000 * (pod + 1) + 100 * number
                    hits[0] += serve(scheduler, worker, f"{next(requests)}", [*range(first, first + CHUNKS)])
                    hits[1] += CHUNKS
            told = {
                address: json.loads(process.get("/samples"))["next"]
                for address, process in zip(addresses, processes, strict=True)
            }
            await until(lambda told=told: all(intake.pods[uid].next == told[uid] for uid in told))
        now[0] += 900.0
        last = datetime.fromtimestamp(now[0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await until(lambda: poller.report(KEY, observed(addresses)).status["observedAt"] == last)
        return poller.report(KEY, observed(addresses)), hits[0] / hits[1], intake.num_samples


def test_what_engines_look_up_brings_a_recommendation() -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(SidecarProcess(memory_size="64Mi")) for _ in range(2)]
        sessions = [
            tuple(
                stack.enter_context(session_of(process, role=role, chunk_bytes=CHUNK_BYTES))
                for role in (Role.SCHEDULER, Role.WORKER)
            )
            for process in processes
        ]
        report, hits, num_samples = asyncio.run(recommended(processes, sessions))
    memory = report.status["memory"]
    assert hits < 0.1  # all documents in turn: what comes again has just been evicted, or nearly all of it
    # A ring begins with the first request that a sidecar follows, and what it held then is not counted.
    assert num_samples == 11 * 2 * NUM_DOCUMENTS * CHUNKS
    assert memory["current"] == "64Mi"
    assert memory["recommended"] == "128Mi"  # 120 MiB and the tables, as near as sizes are told apart
    assert report.memory is None  # by default it only recommends
    by_size = {point["size"]: float(point["hit"]) for point in memory["curve"]}
    assert by_size["64Mi"] == 0
    assert by_size["512Mi"] > 0.9
    assert "more prompt tokens hit" in memory["reason"]
