"""Start and end of the operator, and events that wake a cluster, with kopf on a simulated clock."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient

from lmcache_operator import app
from lmcache_operator.errors import ApiError, RefusedError, UnavailableError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import CLUSTER, PROFILE, ClusterKey
from tests.harness.jumping_loop import now, run
from tests.harness.operator.model import NAMESPACE, World, cluster
from tests.harness.operator.render import CONTEXT


class WatchedWorld(World):
    """A world that notifies the operator of all changes of the cluster, including its status."""

    def __init__(self) -> None:
        super().__init__(cluster())
        self.runs: list[float] = []

        reconciler = Reconciler(
            cast(KubeApi, self), CONTEXT, lambda address, _: self.ask(address), monotonic=now,
            wake=lambda key: self.queue.wake(key),
        )  # fmt: skip

        async def work(key: ClusterKey) -> float | None:
            self.runs.append(now())
            try:
                return await reconciler.reconcile(key)
            finally:
                self.run_stateful_sets()
                for pod in self.pods.values():
                    pod["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}

        self.queue = KeyedQueue(work, num_workers=1, rest=reconciler.rest)
        self.handler, *_ = app.build_registry(self.queue, asyncio.Event().wait)._watching.get_all_handlers()

    loses_events = False

    async def notify(self, kind: str | None) -> None:
        if self.loses_events:
            return
        meta: dict[str, Any] = self.resource["metadata"]
        status = self.resource.get("status", {})
        await cast(Any, self.handler.fn)(namespace=NAMESPACE, meta=meta, status=status, type=kind)

    async def apply_status(self, wanted: dict[str, Any], *manager: str) -> Any:
        live = await super().apply_status(wanted, *manager)
        await self.notify("MODIFIED")
        return live


def watch(seconds: float, prepare: Callable[[WatchedWorld], None]) -> list[float]:
    """Times at which a new cluster is reconciled within this many seconds."""

    async def scenario() -> list[float]:
        world = WatchedWorld()
        prepare(world)
        await world.notify("ADDED")
        await asyncio.sleep(seconds)
        await world.queue.close()
        return world.runs

    return run(scenario())


@pytest.mark.parametrize("error", [UnavailableError, RefusedError])
def test_error_message_that_changes_each_time_keeps_the_pauses(error: type[ApiError]) -> None:
    """A webhook behind a proxy fails like this: each refusal names a different port."""

    def prepare(world: WatchedWorld) -> None:
        ports, apply = itertools.count(40000), world.apply

        async def refuse(wanted: dict[str, Any], uid: str | None) -> None:
            if wanted["kind"] == "NetworkPolicy":
                raise error("PATCH", f'failed calling webhook "v": read tcp 10.0.0.1:{next(ports)}')
            await apply(wanted, uid)

        world.apply = refuse

    runs = watch(600, prepare)
    assert 8 < len(runs) < 30, runs


def test_sidecar_with_changing_answers_is_polled_at_the_pauses() -> None:
    def prepare(world: WatchedWorld) -> None:
        flips = itertools.count()

        async def flip(address: str, _uid: str = "") -> dict[str, Any]:
            number = next(flips)
            return {"is_ready": number % 3 == 0, "not_ready_reason": "x" * number}

        world.ask = flip

    runs = watch(600, prepare)
    assert 8 < len(runs) < 130, runs


def test_annotation_and_deletion_wake_a_cluster_and_status_does_not() -> None:
    async def scenario() -> list[int]:
        world, nums = WatchedWorld(), list[int]()
        changes: list[tuple[str, dict[str, Any]]] = [
            ("ADDED", {}), ("MODIFIED", {"resourceVersion": "7"}), ("MODIFIED", {"annotations": {"a": "b"}}),
            ("MODIFIED", {"generation": 2}), ("DELETED", {}),
        ]  # fmt: skip
        for kind, change in changes:
            world.resource["metadata"] |= change
            await world.notify(kind)
            await asyncio.sleep(100)
            nums.append(len(world.runs))
        await world.queue.close()
        return nums

    num_first, *later = run(scenario())
    assert [num - num_first for num in later] == [0, 1, 2, 3]


def test_heartbeat_confirms_an_idle_cluster_each_minute_and_wakes_nothing() -> None:
    beats = list[float]()

    def prepare(world: WatchedWorld) -> None:
        apply_status = world.apply_status

        async def apply(wanted: dict[str, Any], *manager: str) -> Any:
            if manager:
                beats.append(now())
            return await apply_status(wanted, *manager)

        world.apply_status = apply

    runs = watch(3000, prepare)
    quiet = [run for run in runs if run > 300]
    assert len(quiet) <= 4, "reconciliations of an unchanged cluster"
    pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *beats, 3000.0])]
    assert max(pauses) <= 60, pauses
    assert 50 <= len(beats) <= 70


def test_heartbeat_that_a_run_cancels_is_written_after_that_run() -> None:
    """A new cluster has many runs, and each may cancel the first heartbeat."""

    async def scenario() -> float:
        world = WatchedWorld()
        apply_status = world.apply_status
        sent, written = asyncio.Event(), list[float]()

        async def apply(wanted: dict[str, Any], *manager: str) -> Any:
            if manager and not sent.is_set():
                sent.set()
                await asyncio.Event().wait()
            if manager:
                written.append(now())
            return await apply_status(wanted, *manager)

        world.apply_status = apply
        await world.notify("ADDED")
        await sent.wait()
        world.resource["metadata"]["generation"] += 1
        await world.notify("MODIFIED")
        await asyncio.sleep(100)
        await world.queue.close()
        return written[0]

    assert run(scenario()) < 20


def test_heartbeat_finds_a_change_whose_event_was_lost() -> None:
    async def scenario() -> float:
        world = WatchedWorld()
        await world.notify("ADDED")
        await asyncio.sleep(310)
        world.failures["heartbeat"] = UnavailableError("PATCH", "a restart")
        world.loses_events = True
        world.change(engine={"image": "e:2"})
        await asyncio.sleep(310)
        assert max(world.runs) < 310, "no heartbeat reaches the API server"
        world.failures.clear()
        await asyncio.sleep(61)
        await world.queue.close()
        return max(world.runs)

    assert 620 <= run(scenario()) < 681


def test_operator_that_may_not_read_a_cluster_confirms_nothing() -> None:
    async def scenario() -> list[str]:
        world = WatchedWorld()
        await world.notify("ADDED")
        await asyncio.sleep(100)
        world.failures["get LMCacheCluster"] = RefusedError("GET", "forbidden")
        world.resource["metadata"]["generation"] += 1
        await world.notify("MODIFIED")
        await asyncio.sleep(1)
        world.writes.clear()
        await asyncio.sleep(300)
        await world.queue.close()
        return world.writes

    assert run(scenario()) == []


def test_owner_of_prefill_pods_is_woken_by_their_status_and_not_by_heartbeats() -> None:
    async def scenario() -> list[int]:
        woken, nums = list[ClusterKey](), list[int]()

        async def work(key: ClusterKey) -> float:
            woken.append(key)
            return 1000.0

        queue = KeyedQueue(work, num_workers=1)
        handler, *_ = app.build_registry(queue, asyncio.Event().wait)._watching.get_all_handlers()
        owner = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster", "name": "demo", "uid": "u"}
        meta = {"name": "demo-prefill", "uid": "p", "ownerReferences": [owner | {"controller": True}]}
        changes: list[tuple[str | None, dict[str, Any], dict[str, Any]]] = [
            (None, {}, {}),
            ("MODIFIED", {"resourceVersion": "7", "managedFields": []}, {"lastHeartbeatTime": "now"}),
            ("MODIFIED", {"resourceVersion": "8"}, {"readyReplicas": 1}),
            ("DELETED", {"resourceVersion": "8"}, {}),
        ]
        status: dict[str, Any] = {}
        for kind, metadata, more in changes:
            meta, status = meta | metadata, status | more
            await cast(Any, handler.fn)(namespace=NAMESPACE, meta=meta, status=status, type=kind)
            await asyncio.sleep(1)
            nums.append(woken.count(ClusterKey(NAMESPACE, "demo", "u")))
        await queue.close()
        return nums

    assert run(scenario()) == [1, 1, 2, 3]


# -- start and end of the operator


class Api:
    """An API server that returns the given answers in turn."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers, self.checked_kinds = list(answers), []

    async def serves(self, kind) -> bool:
        self.checked_kinds.append(kind)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_operator_waits_for_its_crd_and_logs_it_once(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(UnavailableError("GET /apis", "starting"), False, False, True, True, False)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert (api.answers, api.checked_kinds) == ([False], [CLUSTER] * 4 + [PROFILE])
    assert [record.message for record in caplog.records] == [
        "waiting for the CRD lmcacheclusters.lmcache.io in the API server"
    ]


def test_operator_starts_without_the_profile_crd(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(True, *[False] * 20)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert len(api.answers) == 10
    assert [record.message for record in caplog.records] == [
        "waiting for the CRD lmcacheprofiles.lmcache.io in the API server"
    ]


class SlowClient:
    """An API server that works on a write for nine seconds. Kopf cancels remaining tasks after five."""

    async def param_serialize(self, verb, path, **_):
        return verb, path, {}

    async def call_api(self, *_, **__):
        await asyncio.sleep(9)
        raise OSError("no answer after all")


def test_ending_operator_waits_for_the_answer_to_its_last_write():
    """Another operator may lead only after that. Kopf waits for its cleanup handlers without a limit."""

    async def scenario() -> float:
        api = KubeApi(cast(ApiClient, SlowClient()))

        async def work(_: str) -> None:
            await api.evict("team", "pod", "uid")

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        handlers = app.build_registry(queue, api.settle)._activities.get_all_handlers()
        (cleanup,) = (each.fn for each in handlers if each.activity and each.activity.value == "cleanup")
        queue.wake("a")
        await asyncio.sleep(1)
        await cast(Any, cleanup)()
        return now()

    assert run(scenario()) == 9


def test_pages_of_all_watched_kinds_take_a_fraction_of_the_memory_limit():
    """kopf lists all kinds at once. Labels and annotations of an object may have 1.5 MiB."""
    num_kinds = len(app._watched()) + 1
    assert app._kopf_settings(()).watching.chunk_size * num_kinds * 1.5 < 128
