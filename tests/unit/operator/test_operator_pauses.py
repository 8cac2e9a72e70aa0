"""Events that wake a cluster, with kopf's handlers, the queue and the reconciler on a simulated clock."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
from lmcache_operator.app import build_registry
from lmcache_operator.errors import ApiError, RefusedError, UnavailableError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey

from tests.harness.jumping_loop import now, run
from tests.harness.operator_model import NAMESPACE, World, cluster
from tests.harness.operator_render import CONTEXT


class WatchedWorld(World):
    """A world that notifies the operator of all changes of the cluster, including its status."""

    def __init__(self) -> None:
        super().__init__(cluster())
        self.runs: list[float] = []

        reconciler = Reconciler(
            cast(KubeApi, self), CONTEXT, lambda address: self.ask(address), monotonic=now
        )

        async def work(key: ClusterKey) -> float | None:
            self.runs.append(now())
            try:
                return await reconciler.reconcile(key)
            finally:
                self.run_stateful_sets()
                for pod in self.pods.values():
                    pod["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}

        self.queue = KeyedQueue(work, num_workers=1)
        self.handler, *_ = build_registry(self.queue, asyncio.Event().wait)._watching.get_all_handlers()

    async def notify(self, kind: str | None) -> None:
        meta: dict[str, Any] = self.resource["metadata"]
        await cast(Any, self.handler.fn)(namespace=NAMESPACE, meta=meta, type=kind)

    async def apply_status(self, wanted: dict[str, Any]) -> None:
        await super().apply_status(wanted)
        await self.notify("MODIFIED")


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

        world.apply = refuse  # type: ignore[method-assign]

    runs = watch(600, prepare)
    assert 8 < len(runs) < 30, runs


def test_sidecar_with_changing_answers_is_polled_at_the_pauses() -> None:
    def prepare(world: WatchedWorld) -> None:
        flips = itertools.count()

        async def flip(_: str) -> dict[str, Any]:
            number = next(flips)
            return {"is_ready": number % 3 == 0, "not_ready_reason": "x" * number}

        world.ask = flip  # type: ignore[method-assign]

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
