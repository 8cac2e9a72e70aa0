"""The poller against real HTTP servers: sidecars that are slow, lie, flood, vanish or restart.

No test waits for a time to be over: each waits until what it expects is there, and the clock that decides is
an argument.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from lmcache_operator.autoscaling.report import Report
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Observed
from lmcache_operator.scaling.poller import Poller
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import RESIZE_REFUSED, SIDECAR, SPEC_HASH
from lmcache_operator.stats import StatsClient

from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service
from tests.harness.operator_model import cluster

PATIENCE = 60.0


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@dataclass
class Pods:
    """Sidecars of one cluster as HTTP servers at addresses of their own; ``odd`` does something else."""

    sidecars: Sidecars
    clock: Callable[[], float]
    odd: dict[int, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=dict)
    num_asked: list[int] = field(default_factory=lambda: [0] * 9)

    def application(self, pod: int) -> web.Application:
        async def answer(request: web.Request) -> web.StreamResponse:
            self.num_asked[pod] += 1
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
    """A poller, and the clusters that it is told of; all of them have the same pods."""

    def __init__(self, pods: Pods, poller: Poller, num_pods: int) -> None:
        self.pods, self.poller = pods, poller
        self.addresses = {f"uid-{pod}": f"127.0.0.{pod + 1}" for pod in range(num_pods)}

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
        one = Observed(
            resource=resource, pods=pods, children={Ref("StatefulSet", "demo-engine"): engine},
            now=datetime.now(UTC),
        )  # fmt: skip
        return {own.name: one for own in COMPONENTS}

    def report(self, number: int = 0, **spec: Any) -> Report | None:
        return self.poller.report(ClusterKey("default", "demo", f"cluster-{number}"), self.observed(**spec))

    async def until(self, found: Callable[[], Any], **spec: Any) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (value := found()):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        return value

    def memory(self) -> Any:
        report = self.report()
        return report.status["memory"] if report else {}


@asynccontextmanager
async def rig(num_pods: int = 2, **options: Any) -> AsyncIterator[Rig]:
    """Its clock goes 15 minutes with each look, so that each poll decides."""
    workload = Workload([])
    minutes = itertools.count(1.8e9, 900.0)
    pods = Pods(Sidecars(workload, Service(num_pods, 0, 50), num_pods, 64 << 30), lambda: next(minutes))
    runners, port = [], 0
    for pod in range(num_pods):
        runner = web.AppRunner(pods.application(pod), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, f"127.0.0.{pod + 1}", port)
        await site.start()
        port = runner.addresses[0][1]
        runners.append(runner)
    woken: list[ClusterKey] = []
    async with StatsClient(port, seconds=5.0) as stats:
        poller = Poller(stats, woken.append, clock=lambda: next(minutes), poll_seconds=0.01, **options)
        try:
            yield Rig(pods, poller, num_pods)
        finally:
            await poller.close()
            for runner in runners:
                await runner.cleanup()


def serve(pods: Pods, pod: int, number: int = 1) -> None:
    for key in range(number):
        pods.sidecars.serve(pod, Request(pods.clock(), 0, (key * 2**40,)))


@in_a_loop
async def test_pods_are_polled_until_the_cluster_goes() -> None:
    async with rig() as found:
        assert found.report() is None
        serve(found.pods, 0)
        await found.until(lambda: found.memory().get("curve"))
        assert found.memory()["current"] == "64Gi"
        found.report(autoscaling={"mode": "Off"})
        await found.until(lambda: not found.poller._queue._lanes)
        number = sum(found.pods.num_asked)
        await asyncio.sleep(0)
        assert sum(found.pods.num_asked) == number


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"[" * 65536)


async def nonsense(request: web.Request) -> web.StreamResponse:
    return web.Response(text=json.dumps({"version": 1, "next": 7, "now": "soon"}))


async def swell(request: web.Request) -> web.StreamResponse:
    """A MiB that would take thirty times as much as objects."""
    return web.Response(text='{"key": [' + "[]," * 340_000 + "[]]}", content_type="application/json")


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="{}")


@pytest.mark.parametrize(
    ("odd", "why"),
    [(hang, "it does not answer"), (flood, "it does not answer"), (refuse, "it does not answer"),
     (swell, "it does not answer"),
     (nonsense, "now is 'soon'")],
)  # fmt: skip
@in_a_loop
async def test_a_pod_that_is_odd_is_told_and_costs_no_other_cluster_anything(odd, why) -> None:
    async with rig() as found:
        for pod in range(2):
            serve(found.pods, pod, 3)
        await found.until(lambda: found.memory().get("curve"))
        found.pods.odd[1] = odd
        expected = f"1 of 2 pods say nothing of use (pod-1: {why})"
        await found.until(lambda: found.memory()["reason"] == expected)
        assert found.memory()["limitedBy"] == "Samples"
        # Another cluster, of the pod that is not odd, is watched meanwhile.
        del found.addresses["uid-1"]
        await found.until(lambda: (one := found.report(1)) and one.status["memory"].get("curve"))
        found.addresses["uid-1"] = "127.0.0.2"
        del found.pods.odd[1]
        await found.until(
            lambda: found.memory()["limitedBy"] != "Samples" or "say" not in found.memory()["reason"]
        )


@in_a_loop
async def test_the_reconciler_is_told_by_what_it_knows_of_pods() -> None:
    """A rollout, and a size that a pod could not get."""
    async with rig() as found:
        serve(found.pods, 0)
        await found.until(lambda: found.memory().get("curve"))
        pods = found.observed()["engine"].pods
        at = datetime.now(UTC).isoformat()
        refusal = json.dumps({"bytes": 1 << 40, "at": at, "message": "no room"})
        pods[1]["metadata"]["annotations"] |= {RESIZE_REFUSED: refusal}
        pods[0]["status"]["conditions"] = []
        key = ClusterKey("default", "demo", "cluster-0")
        one = replace(found.observed()["engine"], pods=pods)
        report = found.poller.report(key, {own.name: one for own in COMPONENTS})
        situation = found.poller._watched["cluster-0"].situation
        assert situation.refusals == ((1 << 40, "pod pod-1: no room"),)
        assert situation.obstacle == ("Cooldown", "1 of 2 pods are ready and as declared")
        assert report.status["memory"]["reason"]


@in_a_loop
async def test_a_pod_that_is_gone_is_forgotten() -> None:
    async with rig() as found:
        serve(found.pods, 1, 5)
        await found.until(lambda: found.memory().get("curve"))
        sizing = found.poller._watched["cluster-0"].sizing
        await found.until(lambda: sizing.intake.traffic.curve.num_keys)
        del found.addresses["uid-1"]
        found.report()
        await found.until(lambda: "uid-1" not in sizing.intake.pods)
        assert len(sizing.intake.traffic.curve._stacks) == 0


@in_a_loop
async def test_a_sidecar_that_restarts_is_followed_again() -> None:
    async with rig() as found:
        serve(found.pods, 0, 9)
        await found.until(lambda: found.memory().get("curve"))
        intake = found.poller._watched["cluster-0"].sizing.intake
        found.pods.sidecars.restart(0, found.pods.clock())
        asked = found.pods.num_asked[0]
        await found.until(lambda: found.pods.num_asked[0] > asked + 8)
        before = intake.num_samples
        serve(found.pods, 0, 4)
        await found.until(lambda: intake.num_samples == before + 4)


class Counting:
    """Sidecars that never have an answer, at once, or ever."""

    def __init__(self, hangs: Callable[[str], bool]) -> None:
        self.hangs = hangs
        self.num_asked = self.most = 0

    async def samples(self, address: str, question: object) -> Any:
        self.num_asked += 1
        self.most = max(self.most, self.num_asked)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.hangs(address):
            await asyncio.Event().wait()
        self.num_asked -= 1

    async def read(self, address: str) -> Any:
        raise AssertionError


def many(observed: dict[str, Observed], number: int, address: str) -> dict[str, Observed]:
    one = observed["engine"].pods[0]
    pods = tuple(
        one
        | {"metadata": one["metadata"] | {"name": f"pod-{number}", "uid": f"uid-{number}"}}
        | {"status": one["status"] | {"podIP": address}}
        for number in range(number)
    )
    return {name: Observed(resource=own.resource, pods=pods, now=own.now) for name, own in observed.items()}


@pytest.mark.parametrize(("num_clusters", "num_pods", "most"), [(1, 1000, 8), (8, 125, 32)])
@in_a_loop
async def test_a_thousand_pods_are_asked_a_few_at_a_time(num_clusters, num_pods, most) -> None:
    async with rig() as found:
        sidecars = Counting(lambda _: False)
        minutes = itertools.count(1.8e9, 900.0)
        poller = Poller(sidecars, lambda key: None, clock=lambda: next(minutes), poll_seconds=0.01)
        observed = many(found.observed(), num_pods, "127.0.0.1")
        keys = [ClusterKey("default", "demo", f"many-{number}") for number in range(num_clusters)]
        try:
            reports = [
                await found.until(lambda key=key: poller.report(key, observed))
                for key in [key for key in keys if poller.report(key, observed) is None]
            ]
        finally:
            await poller.close()
        assert sidecars.most == most
        for report in reports:
            expected = f"{num_pods} of {num_pods} pods say nothing of use (pod-0: "
            assert report.status["memory"]["reason"].startswith(expected)


@in_a_loop
async def test_nothing_is_told_of_pods_that_never_answered_before_a_decision_is_due() -> None:
    """So that a cluster that starts, or an operator, tells of no silence that is none."""
    async with rig() as found:
        sidecars, now = Counting(lambda _: False), [1.8e9]
        poller = Poller(sidecars, lambda key: None, clock=lambda: now[0], poll_seconds=0.01)
        key, observed = ClusterKey("default", "demo", "silent"), many(found.observed(), 1, "127.0.0.1")
        try:
            for _ in range(3):
                sidecars.most = 0
                assert poller.report(key, observed) is None
                await found.until(lambda: sidecars.most)
            now[0] += 900.0
            assert await found.until(lambda: poller.report(key, observed))
        finally:
            await poller.close()


@in_a_loop
async def test_pods_that_hang_hold_up_their_own_cluster_only() -> None:
    async with rig() as found:
        sidecars = Counting(lambda address: address == "127.0.0.9")
        minutes = itertools.count(1.8e9, 900.0)
        poller = Poller(sidecars, lambda key: None, clock=lambda: next(minutes), poll_seconds=0.01)
        hung, other = many(found.observed(), 64, "127.0.0.9"), many(found.observed(), 64, "127.0.0.1")
        try:
            poller.report(ClusterKey("default", "hung", "hung"), hung)
            await found.until(lambda: sidecars.num_asked == 8)
            assert await found.until(lambda: poller.report(ClusterKey("default", "other", "other"), other))
            assert sidecars.num_asked >= 8, "they hang still"
            assert poller.report(ClusterKey("default", "hung", "hung"), hung) is None
        finally:
            await poller.close()
