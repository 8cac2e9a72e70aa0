"""The poller against real HTTP servers: sidecars that hang, flood, restart, or return invalid answers.

No test waits for a fixed time. Each test waits for its expected state, and passes the clock for decisions.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from lmcache_operator.autoscaling.intake.lookups import Intake
from lmcache_operator.autoscaling.poller import Poller
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.policy.tier import Prices
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import RESIZE_REFUSED, SIDECAR
from lmcache_store.curves import HASHES, Lookup
from testing.workloads.requests import row_hash
from tests.harness.loops import in_a_loop
from tests.harness.operator.polled_pods import many, rig, serve

KEY = ClusterKey("default", "demo", "cluster-0")


@in_a_loop
async def test_cluster_of_another_namespace_is_not_forgotten() -> None:
    """Any user can create an object whose owner has the uid of another cluster."""
    async with rig() as poller_rig:
        poller_rig.report()
        poller_rig.poller.forget(KEY._replace(namespace="theirs"))
        assert KEY in poller_rig.poller._watched


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


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="{}")


@pytest.mark.parametrize(
    ("fault", "why"),
    [*((fault, "its sidecar does not answer") for fault in (hang, flood, refuse, expand)),
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
        engine = replace(poller_rig.observed()["engine"], pods=pods)
        report = poller_rig.poller.report(KEY, {component.name: engine for component in COMPONENTS})
        situation = poller_rig.poller._watched[KEY].situation
        assert situation.refusals == ((1 << 40, "pod pod-1: no free memory"),)
        assert situation.obstacle == ("Cooldown", "1 of 2 pods are ready and match the spec")
        assert report.status["memory"]["reason"]
        pods[0]["status"]["conditions"] = pods[1]["status"]["conditions"]
        (each,) = engine.children.values()
        half = each | {"spec": each["spec"] | {"replicas": 1}}
        groups = {Ref("StatefulSet", f"demo-engine-{number}"): half for number in range(2)}
        engine = replace(engine, pods=pods, children=groups)
        poller_rig.poller.report(KEY, {component.name: engine for component in COMPONENTS})
        assert poller_rig.poller._watched[KEY].situation.obstacle is None, "two engines of one pod each"


@in_a_loop
async def test_chosen_size_is_limited_by_the_maximum_of_running_pods() -> None:
    async with rig() as poller_rig:
        scaling = {"mode": "Auto", "memory": {"minSize": "32Gi", "maxSize": "512Gi"}}
        observed = poller_rig.observed(autoscaling=scaling)
        for pod, max_gib in zip(observed["engine"].pods, (256, 128), strict=True):
            (sidecar,) = pod["spec"]["initContainers"]
            sidecar["args"] = [f"--memory-size={64 << 30}"]
            sidecar["env"] = [{"name": "LMCACHE_MEMORY_MAX_SIZE", "value": f"{max_gib << 30}"}]
        poller_rig.poller.report(KEY, observed)
        situation = poller_rig.poller._watched[KEY].situation
        assert (situation.largest_in_place, situation.memory_bounds) == (128 << 30, (32 << 30, 128 << 30))
        # A recommendation may need new pods.
        poller_rig.report(autoscaling=scaling | {"mode": "Recommend"})
        assert poller_rig.poller._watched[KEY].situation.memory_bounds == (32 << 30, 512 << 30)


@in_a_loop
async def test_a_pod_with_a_part_of_each_row_stands_for_all_pods_of_its_engine() -> None:
    """Only the first pod counts requests. Bytes of a part cost as much as those of all parts."""
    shards = {"remote": {"managed": {"shards": 2, "memoryPerShard": "1Gi"}}, "memory": {"size": "64Gi"}}
    prices = {"prices": {"gpuHour": "3", "memoryGiBHour": "0.01", "shardGiBHour": "0.02"}}
    engine = {"nodes": 2, "gpu": {"count": 1}, "parallelism": {"tensor": 2}}
    async with rig() as poller_rig:
        poller_rig.report(tiers=shards, autoscaling=prices)
        watched = poller_rig.poller._watched[KEY]
        whole = watched.situation.settings
        poller_rig.report(tiers=shards, autoscaling=prices, engine=engine)
        assert [*watched.situation.pods] == [*watched.addresses] == ["uid-0"]
        part = watched.situation.settings
    assert part.prices == Prices(3, 0.02, 0.04)
    assert (part.num_parts, part.memory, part.shards) == (2, whole.memory, whole.shards)
    assert part.shard_bytes * 2 == whole.shard_bytes


@in_a_loop
async def test_deleted_pod_is_forgotten() -> None:
    async with rig() as poller_rig:
        serve(poller_rig.pods, 1, 5)
        await poller_rig.until(lambda: poller_rig.memory().get("curve"))
        sizing = poller_rig.poller._watched[KEY].sizing
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
        intake = poller_rig.poller._watched[KEY].sizing.intake
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
            poller_rig.poller.report(KEY, {component.name: engine for component in COMPONENTS})
            situation = poller_rig.poller._watched[KEY].situation
            assert [engine.size for engine in situation.unplaced] == sizes
            assert len(situation.pods) == 2, "a pod without a node must not be polled"


# -- many clusters: pods of a cluster never delay other clusters


class CountingSidecars:
    """Sidecars that have no samples or hang, with a count of concurrent polls."""

    def __init__(self, hangs: Callable[[str], bool]) -> None:
        self.hangs = hangs
        self.num_running = self.max_concurrent = 0

    async def samples(self, address: str, _: str, question: object) -> Any:
        self.num_running += 1
        self.max_concurrent = max(self.max_concurrent, self.num_running)
        for _turn in range(3):
            await asyncio.sleep(0)
        if self.hangs(address):
            await asyncio.Event().wait()
        self.num_running -= 1

    async def read(self, address: str, _: str) -> Any:
        raise AssertionError


@asynccontextmanager
async def polling(sidecars: Any, clock: Callable[[], float]) -> AsyncIterator[Poller]:
    poller = Poller(sidecars, lambda key: None, clock=clock, poll_seconds=0.01)
    try:
        yield poller
    finally:
        await poller.close()


def clock(minutes: int = 15) -> Callable[[], float]:
    """A clock that advances at each read."""
    times = itertools.count(1.8e9, 60.0 * minutes)
    return lambda: next(times)


@pytest.mark.parametrize(("num_clusters", "num_pods", "max_concurrent"), [(1, 1000, 8), (8, 125, 32)])
@in_a_loop
async def test_pods_are_polled_with_limited_concurrency(num_clusters, num_pods, max_concurrent) -> None:
    sidecars = CountingSidecars(lambda _: False)
    async with rig() as poller_rig, polling(sidecars, clock()) as poller:
        observed = many(poller_rig.observed(), num_pods, "127.0.0.1")
        keys = [ClusterKey("default", "demo", f"many-{number}") for number in range(num_clusters)]
        reports = [
            await poller_rig.until(lambda key=key: poller.report(key, observed))
            for key in [key for key in keys if poller.report(key, observed) is None]
        ]
    assert sidecars.max_concurrent == max_concurrent
    for report in reports:
        expected = f"{num_pods} of {num_pods} pods return no usable samples (pod-0: "
        assert report.status["memory"]["reason"].startswith(expected)


@in_a_loop
async def test_silent_pods_are_reported_only_when_a_decision_is_due() -> None:
    """A starting cluster or operator must not report pods as silent too early."""
    sidecars, now = CountingSidecars(lambda _: False), [1.8e9]
    async with rig() as poller_rig, polling(sidecars, lambda: now[0]) as poller:
        key, observed = ClusterKey("default", "demo", "silent"), many(poller_rig.observed(), 1, "127.0.0.1")
        for _ in range(3):
            sidecars.max_concurrent = 0
            assert poller.report(key, observed) is None
            await poller_rig.until(lambda: sidecars.max_concurrent)
        now[0] += 900.0
        assert await poller_rig.until(lambda: poller.report(key, observed))


@in_a_loop
async def test_hanging_pods_delay_only_their_own_cluster() -> None:
    sidecars = CountingSidecars(lambda address: address == "127.0.0.9")
    async with rig() as poller_rig, polling(sidecars, clock()) as poller:
        hung, small = (many(poller_rig.observed(), 64, f"127.0.0.{number}") for number in (9, 1))
        key, other = (ClusterKey("default", name, name) for name in ("hung", "other"))
        poller.report(key, hung)
        await poller_rig.until(lambda: sidecars.num_running == 8)
        assert await poller_rig.until(lambda: poller.report(other, small))
        assert sidecars.num_running >= 8, "the hanging polls must not end"
        assert poller.report(key, hung) is None


class FloodingSidecars:
    """Sidecars that return too many samples, and a sidecar that returns few after that intake has begun."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.num_keys, self.num_polls = clock, 0, 0.0
        self.is_counting = asyncio.Event()

    async def samples(self, address: str, _: str, question: Mapping[str, int]) -> Any:
        if address == "127.0.0.4":
            number, size = 60, 1000
            self.num_polls += 1 / 4
        else:
            await self.is_counting.wait()
            number, size = 1, 10
        keys = [row_hash(self.num_keys, index) for index in range(size)] * number
        self.num_keys += len(keys)
        now = self.clock()
        return {
            "version": 1, "now": now, "started": 1.0, "namespace": "5f" * 32, "chunk_tokens": 256,
            "row_bytes": 32 << 20, "below": HASHES, "since": question["since"],
            "next": question["since"] + len(keys), "dropped": 0, "t0": now, "ms": [0] * number,
            "num": [size] * number, "key": "".join(f"{key:016x}" for key in keys),
        }  # fmt: skip

    async def read(self, address: str, _: str) -> Any:
        lookups: dict[str, Any] = dict.fromkeys(
            ("gpus", "prefill_tokens_per_second", "kv_bytes_per_token"), 1
        )
        lookups |= {"lookup_tokens": self.num_keys, "hit_tokens": {}, "engine_kv_bytes": 0}
        return {"memory": {"size_bytes": 64 << 30}, "lookups": lookups}


@in_a_loop
async def test_flooding_pods_take_turns_with_others_and_lose_samples(monkeypatch) -> None:
    batches: list[tuple[Intake, int]] = []
    feed, minutes = Intake._feed, clock(1)
    sidecars = FloodingSidecars(minutes)

    def count(intake: Intake, batch: Sequence[Lookup]) -> None:
        batches.append((intake, sum(len(lookup.keys) for lookup in batch)))
        if len(batches) > 3:
            sidecars.is_counting.set()
        feed(intake, batch)

    monkeypatch.setattr(Intake, "_feed", count)
    async with rig() as poller_rig, polling(sidecars, minutes) as poller:
        flooding, small = (many(poller_rig.observed(), number, f"127.0.0.{number}") for number in (4, 1))
        keys = [ClusterKey("default", name, name) for name in ("flood", "other")]
        for key, observed in zip(keys, (flooding, small), strict=True):
            poller.report(key, observed)
        flooded_intake, small_intake = (poller._watched[key].sizing.intake for key in keys)

        def has_lost() -> bool:
            report = poller.report(keys[0], flooding)
            reason = "samples of pod-0 were lost before they were read"
            return bool(report and report.status["memory"]["reason"] == reason)

        await poller_rig.until(has_lost)
        assert await poller_rig.until(lambda: poller.report(keys[1], small))
    first_turn = [intake is small_intake for intake, _ in batches].index(True)
    assert first_turn < 40, "the small cluster gets a turn before all samples of the other one are counted"
    assert flooded_intake.num_samples <= 4 * 32_768 * sidecars.num_polls
