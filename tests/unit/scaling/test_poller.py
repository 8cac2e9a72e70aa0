"""The poller against real HTTP servers: sidecars that are slow, lie, flood, vanish or restart.

No test waits for a time to be over: each waits until what it expects is there, and the clock that decides is
an argument.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from lmcache_operator.components import COMPONENTS
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import RESIZE_REFUSED, SIDECAR

from tests.harness.polled_pods import in_a_loop, rig, serve


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


async def know_no_samples(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="404: Not Found")


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="{}")


@pytest.mark.parametrize(
    ("odd", "why"),
    [(hang, "it does not answer"), (flood, "it does not answer"), (refuse, "it does not answer"),
     (swell, "it does not answer"),
     (know_no_samples, "its image is of before sidecars told what is looked up"),
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
async def test_no_size_is_chosen_beyond_what_each_running_pod_can_have() -> None:
    async with rig() as found:
        scaling = {"mode": "Auto", "memory": {"minSize": "32Gi", "maxSize": "512Gi"}}
        observed = found.observed(autoscaling=scaling)
        for pod, most in zip(observed["engine"].pods, (256, 128), strict=True):
            (sidecar,) = pod["spec"]["initContainers"]
            sidecar["args"] = [f"--memory-size={64 << 30}"]
            sidecar["env"] = [{"name": "LMCACHE_MEMORY_MAX_SIZE", "value": f"{most << 30}"}]
        found.poller.report(ClusterKey("default", "demo", "cluster-0"), observed)
        situation = found.poller._watched["cluster-0"].situation
        assert (situation.reach, situation.memory_bounds) == (128 << 30, (32 << 30, 128 << 30))
        # What is recommended only may need other pods.
        found.report(autoscaling=scaling | {"mode": "Recommend"})
        assert found.poller._watched["cluster-0"].situation.memory_bounds == (32 << 30, 512 << 30)


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


@in_a_loop
async def test_the_size_of_a_pod_without_a_node_is_noticed_after_ten_minutes() -> None:
    async with rig() as found:
        now, sidecar = datetime.now(UTC), {"name": SIDECAR, "args": [f"--memory-size={128 << 30}"]}
        for minutes, declared, sizes in ((11, "64Gi", [128 << 30]), (9, "64Gi", []), (11, "128Gi", [])):
            since = (now - timedelta(minutes=minutes)).isoformat()
            placed = {"type": "PodScheduled", "status": "False", "message": "2 Insufficient memory."}
            waiting = {"phase": "Pending", "conditions": [placed | {"lastTransitionTime": since}]}
            metadata = {"name": "pod-9", "uid": "uid-9", "annotations": {}}
            pod = {"metadata": metadata, "spec": {"initContainers": [sidecar]}, "status": waiting}
            one = found.observed(tiers={"memory": {"size": declared}})["engine"]
            one = replace(one, now=now, pods=(*one.pods, pod))
            found.poller.report(
                ClusterKey("default", "demo", "cluster-0"), {own.name: one for own in COMPONENTS}
            )
            situation = found.poller._watched["cluster-0"].situation
            assert [one.size for one in situation.unplaced] == sizes
            assert len(situation.pods) == 2, "a pod without a node is not asked for samples"
