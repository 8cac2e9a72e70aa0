"""The poller against real HTTP servers: sidecars that hang, flood, restart, or return invalid answers.

No test waits for a fixed time. Each test waits for its expected state, and passes the clock for decisions.
"""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import RESIZE_REFUSED, SIDECAR

from tests.harness.loops import in_a_loop
from tests.harness.polled_pods import rig, serve


@in_a_loop
async def test_pods_are_polled_until_autoscaling_is_off() -> None:
    async with rig() as poller_rig:
        assert poller_rig.report() is None
        serve(poller_rig.pods, 0)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        assert poller_rig.memory()["current"] == "64Gi"
        poller_rig.report(autoscaling={"mode": "Off"})
        await poller_rig.until(lambda: not poller_rig.poller._queue._lanes)
        number = sum(poller_rig.pods.num_polls)
        await asyncio.sleep(0)
        assert sum(poller_rig.pods.num_polls) == number


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


async def expand(request: web.Request) -> web.StreamResponse:
    """A response of 1 MiB that needs thirty times as much memory as Python objects."""
    return web.Response(text='{"key": [' + "[]," * 340_000 + "[]]}", content_type="application/json")


async def have_no_samples_endpoint(request: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="404: Not Found")


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="{}")


NO_SAMPLES = (
    "its sidecar's image lacks /samples: update it (spec.sidecar.image, or spec.images.policy: Follow)"
)


@pytest.mark.parametrize(
    ("fault", "why"),
    [*((fault, "its sidecar does not answer") for fault in (hang, flood, refuse, expand)),
     (have_no_samples_endpoint, NO_SAMPLES),
     (nonsense, "now is invalid: 'soon'")],
)  # fmt: skip
@in_a_loop
async def test_faulty_pod_is_reported_and_affects_no_other_cluster(fault, why) -> None:
    async with rig() as poller_rig:
        for pod in range(2):
            serve(poller_rig.pods, pod, 3)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        poller_rig.pods.odd[1] = fault
        expected = f"1 of 2 pods return no usable samples (pod-1: {why})"
        await poller_rig.until(lambda: poller_rig.memory()["reason"] == expected)
        assert poller_rig.memory()["limitedBy"] == "Samples"
        # A second cluster with only the healthy pod works in the meantime.
        del poller_rig.addresses["uid-1"]
        await poller_rig.until(
            lambda: (second_report := poller_rig.report(1)) and second_report.status["memory"].get("curve")
        )
        poller_rig.addresses["uid-1"] = "127.0.0.2"
        del poller_rig.pods.odd[1]
        await poller_rig.until(lambda: "usable" not in poller_rig.memory()["reason"])


@in_a_loop
async def test_report_uses_rollouts_and_refused_resizes_of_pods() -> None:
    """The pods show a rollout, and a refused resize."""
    async with rig() as poller_rig:
        serve(poller_rig.pods, 0)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        pods = poller_rig.observed()["engine"].pods
        refused_at = datetime.now(UTC).isoformat()
        refusal = json.dumps({"bytes": 1 << 40, "at": refused_at, "message": "no free memory"})
        pods[1]["metadata"]["annotations"] |= {RESIZE_REFUSED: refusal}
        pods[0]["status"]["conditions"] = []
        key = ClusterKey("default", "demo", "cluster-0")
        engine = replace(poller_rig.observed()["engine"], pods=pods)
        report = poller_rig.poller.report(key, {component.name: engine for component in COMPONENTS})
        situation = poller_rig.poller._watched["cluster-0"].situation
        assert situation.refusals == ((1 << 40, "pod pod-1: no free memory"),)
        assert situation.obstacle == ("Cooldown", "1 of 2 pods are ready and match the spec")
        assert report.status["memory"]["reason"]


@in_a_loop
async def test_chosen_size_is_limited_by_the_maximum_of_running_pods() -> None:
    async with rig() as poller_rig:
        scaling = {"mode": "Auto", "memory": {"minSize": "32Gi", "maxSize": "512Gi"}}
        observed = poller_rig.observed(autoscaling=scaling)
        for pod, max_gib in zip(observed["engine"].pods, (256, 128), strict=True):
            (sidecar,) = pod["spec"]["initContainers"]
            sidecar["args"] = [f"--memory-size={64 << 30}"]
            sidecar["env"] = [{"name": "LMCACHE_MEMORY_MAX_SIZE", "value": f"{max_gib << 30}"}]
        poller_rig.poller.report(ClusterKey("default", "demo", "cluster-0"), observed)
        situation = poller_rig.poller._watched["cluster-0"].situation
        assert (situation.largest_in_place, situation.memory_bounds) == (128 << 30, (32 << 30, 128 << 30))
        # A recommendation may need new pods.
        poller_rig.report(autoscaling=scaling | {"mode": "Recommend"})
        assert poller_rig.poller._watched["cluster-0"].situation.memory_bounds == (32 << 30, 512 << 30)


@in_a_loop
async def test_deleted_pod_is_forgotten() -> None:
    async with rig() as poller_rig:
        serve(poller_rig.pods, 1, 5)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        sizing = poller_rig.poller._watched["cluster-0"].sizing
        await poller_rig.until(lambda: sizing.intake.traffic.curve.num_keys)
        del poller_rig.addresses["uid-1"]
        poller_rig.report()
        await poller_rig.until(lambda: "uid-1" not in sizing.intake.pods)
        assert len(sizing.intake.traffic.curve._stacks) == 0


@in_a_loop
async def test_restarted_sidecar_is_read_from_its_new_position() -> None:
    async with rig() as poller_rig:
        serve(poller_rig.pods, 0, 9)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        intake = poller_rig.poller._watched["cluster-0"].sizing.intake
        poller_rig.pods.sidecars.restart(0, poller_rig.pods.clock())
        num_polls = poller_rig.pods.num_polls[0]
        await poller_rig.until(lambda: poller_rig.pods.num_polls[0] > num_polls + 8)
        before = intake.num_samples
        serve(poller_rig.pods, 0, 4)
        await poller_rig.until(lambda: intake.num_samples == before + 4)


@in_a_loop
async def test_size_of_an_unplaced_pod_is_known_after_ten_minutes() -> None:
    async with rig() as poller_rig:
        now, sidecar = datetime.now(UTC), {"name": SIDECAR, "args": [f"--memory-size={128 << 30}"]}
        for minutes, declared, sizes in ((11, "64Gi", [128 << 30]), (9, "64Gi", []), (11, "128Gi", [])):
            unplaced_since = (now - timedelta(minutes=minutes)).isoformat()
            unscheduled = {"type": "PodScheduled", "status": "False", "message": "2 Insufficient memory."}
            conditions = [unscheduled | {"lastTransitionTime": unplaced_since}]
            waiting = {"phase": "Pending", "conditions": conditions}
            metadata = {"name": "pod-9", "uid": "uid-9", "annotations": {}}
            pod = {"metadata": metadata, "spec": {"initContainers": [sidecar]}, "status": waiting}
            engine = poller_rig.observed(tiers={"memory": {"size": declared}})["engine"]
            engine = replace(engine, now=now, pods=(*engine.pods, pod))
            key = ClusterKey("default", "demo", "cluster-0")
            poller_rig.poller.report(key, {component.name: engine for component in COMPONENTS})
            situation = poller_rig.poller._watched["cluster-0"].situation
            assert [engine.size for engine in situation.unplaced] == sizes
            assert len(situation.pods) == 2, "a pod without a node must not be polled"
