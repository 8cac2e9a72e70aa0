"""Sidecars as HTTP servers, and a poller that knows their clusters, with a clock that never waits."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from lmcache_operator.autoscaling.poller import Poller
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Observed
from lmcache_operator.policy.report import Report
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import SIDECAR, SPEC_HASH
from lmcache_operator.stats import StatsClient
from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service
from tests.harness.operator.model import cluster
from tests.harness.web import served

PATIENCE = 60.0


@dataclass
class Pods:
    """Sidecars of one cluster as HTTP servers with different addresses. ``odd`` overrides answers by pod."""

    sidecars: Sidecars
    clock: Callable[[], float]
    odd: dict[int, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=dict)
    num_polls: list[int] = field(default_factory=lambda: [0] * 9)

    def application(self, pod: int) -> web.Application:
        async def answer(request: web.Request) -> web.StreamResponse:
            self.num_polls[pod] += 1
            if odd := self.odd.get(pod):
                return await odd(request)
            if request.path == "/stats":
                return web.json_response(self.sidecars.stats(pod))
            question = {name: int(value) for name, value in request.query.items()}
            return web.json_response(self.sidecars.samples(pod, self.clock(), **question))

        application = web.Application()
        application.router.add_get("/{name}", answer)
        return application


class Rig:
    """A poller and its clusters, which all have the same pods."""

    def __init__(self, pods: Pods, poller: Poller) -> None:
        self.pods, self.poller = pods, poller
        self.addresses = {f"uid-{pod}": f"127.0.0.{pod + 1}" for pod in range(2)}

    def observed(self, **spec: Any) -> dict[str, Observed]:
        template = {"metadata": {"annotations": {SPEC_HASH: "1"}}}
        number = len(self.addresses)
        engine = {"metadata": {"uid": "set"}, "spec": {"replicas": number, "template": template}}
        resource = cluster(**{"tiers": {"memory": {"size": "64Gi"}}} | spec)
        ready = [{"type": "Ready", "status": "True"}]
        pods = tuple(
            {
                "metadata": {"name": f"pod-{uid[-1]}", "uid": uid, "annotations": {SPEC_HASH: "1"}},
                "spec": {"initContainers": [{"name": SIDECAR}]},
                "status": {"phase": "Running", "podIP": address, "conditions": ready},
            }
            for uid, address in self.addresses.items()
        )
        observation = Observed(
            resource=resource, pods=pods, children={Ref("StatefulSet", "demo-engine"): engine},
            now=datetime.now(UTC),
        )  # fmt: skip
        return {component.name: observation for component in COMPONENTS}

    def report(self, number: int = 0, **spec: Any) -> Report | None:
        return self.poller.report(ClusterKey("default", "demo", f"cluster-{number}"), self.observed(**spec))

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (value := condition()):  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.01)  # real time: polls
        return value

    def memory(self) -> Any:
        report = self.report()
        return report.status["memory"] if report else {}


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """A rig of two pods whose clock advances by 15 minutes at each read, so that each poll decides."""
    workload = Workload([])
    minutes = itertools.count(1.8e9, 900.0)
    pods = Pods(Sidecars(workload, Service(2, 0, 50), 2, 64 << 30), lambda: next(minutes))
    port = 0
    async with AsyncExitStack() as stack:
        for pod in range(2):
            site = served(pods.application(pod), f"127.0.0.{pod + 1}", port)
            port = await stack.enter_async_context(site)
        stats = await stack.enter_async_context(StatsClient(port, seconds=5.0))
        poller = Poller(stats, lambda _: None, clock=lambda: next(minutes), poll_seconds=0.01)
        stack.push_async_callback(poller.close)
        yield Rig(pods, poller)


def serve(pods: Pods, pod: int, number: int = 1) -> None:
    for key in range(number):
        pods.sidecars.serve(pod, Request(pods.clock(), 0, (key * 2**40,)))


def many(observed: dict[str, Observed], number: int, address: str) -> dict[str, Observed]:
    first = observed["engine"].pods[0]
    pods = tuple(
        first
        | {"metadata": first["metadata"] | {"name": f"pod-{number}", "uid": f"uid-{number}"}}
        | {"status": first["status"] | {"podIP": address}}
        for number in range(number)
    )
    return {
        name: Observed(resource=item.resource, pods=pods, now=item.now) for name, item in observed.items()
    }
