"""The operator's poller reads the samples of two real sidecars and recommends a size."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from typing import Any

import numpy as np
from lmcache_operator.autoscaling.intake.poller import Poller
from lmcache_operator.components.base import Observed
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import SIDECAR
from lmcache_operator.stats import StatsClient

from lmcache.rpc.hello import Role
from lmcache.rpc.session import Scheduled, Session
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
"""Documents of each pod: 120 MiB of rows, while a pod has 64 MiB."""


def serve(scheduler: Session, worker: Session, request: str, chunks: list[int]) -> int:
    """Look up the chunks, store the missing ones, and return the number of hits."""
    keys = make_keys(*chunks)
    num_hits = len(scheduler.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).rows)
    scheduled = Scheduled(num_hit_chunks=num_hits, num_loaded_tokens=CHUNK_TOKENS * num_hits)
    scheduler.lookup(request, [(0, keys)], hint=True, scheduled=scheduled, prefill_tokens_per_second=10_000.0)
    missing = keys[64 * num_hits :]
    reserved = worker.reserve(0, missing, request_id=request, first_chunk=num_hits) if missing else []
    worker.commit([reservation.slot for reservation in reserved if reservation.result is Reserved.SLOT])
    return num_hits


class ByPort:
    """A client for sidecars that share one address and differ in their ports."""

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
    observation = Observed(
        resource=cluster(tiers={"memory": {"size": "64Mi"}}, autoscaling={"memory": {"maxSize": "512Mi"}}),
        children={Ref("StatefulSet", "demo-engine"): engine},
        pods=pods,
        now=datetime.now(UTC),
    )
    return {component.name: observation for component in COMPONENTS}


async def poll(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (value := condition()):  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)  # real time: a pause between polls
    return value


async def recommended(processes: list[SidecarProcess], sessions: list[tuple[Session, Session]]) -> Any:
    """The report after an hour with 12 rounds of requests, the hit ratio, and the number of samples."""
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
        await poll(lambda: len(intake.pods) == 2 and all(pod.started for pod in intake.pods.values()))
        for _ in range(12):
            now[0] += 300.0
            for pod, (scheduler, worker) in enumerate(sessions):
                for number in range(NUM_DOCUMENTS):
                    first = 1_000_000 * (pod + 1) + 100 * number
                    hits[0] += serve(scheduler, worker, f"{next(requests)}", [*range(first, first + CHUNKS)])
                    hits[1] += CHUNKS
            next_samples = {
                address: json.loads(process.get("/samples"))["next"]
                for address, process in zip(addresses, processes, strict=True)
            }
            await poll(lambda ends=next_samples: all(intake.pods[uid].next == ends[uid] for uid in ends))
        now[0] += 900.0
        last = datetime.fromtimestamp(now[0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await poll(lambda: poller.report(KEY, observed(addresses)).status["observedAt"] == last)
        return poller.report(KEY, observed(addresses)), hits[0] / hits[1], intake.num_samples


def test_lookups_of_engines_lead_to_a_recommendation() -> None:
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
    assert hits < 0.1  # the documents come in turn: nearly every document has just been evicted
    # The poller does not count the samples that a ring held before its first poll.
    assert num_samples == 11 * 2 * NUM_DOCUMENTS * CHUNKS
    assert memory["current"] == "64Mi"
    assert memory["recommended"] == "128Mi"  # 120 MiB and the tables, rounded to the steps of the curve
    assert report.memory is None  # the default mode only recommends
    by_size = {point["size"]: float(point["hit"]) for point in memory["curve"]}
    assert by_size["64Mi"] == 0
    assert by_size["512Mi"] > 0.9
    assert "percentage points more hits" in memory["reason"]
