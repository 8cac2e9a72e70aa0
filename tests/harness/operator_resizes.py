"""Pods whose memory tiers get other sizes, with the kubelet and the sidecars that have their say in it."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from lmcache_operator.components.base import Plan
from lmcache_operator.components.resize import sidecar_memory
from lmcache_operator.errors import RefusedError
from lmcache_operator.reconcile.apply import Applier
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from lmcache.units import parse_quantity
from tests.harness.operator_model import NAME, NAMESPACE, UID, Object, World
from tests.harness.operator_plans import observe, plan, settled_world, status_of

MI = 2**20
NODE_BYTES = 6 << 30
"""What one sidecar may have on a node of these worlds."""


class KilledError(BaseException):
    """The operator is no more; nothing of it catches this."""


class Sidecar:
    """One that does at once what its file says, limit or no limit: whoever tells it has to know better."""

    def __init__(self, pod: Object) -> None:
        self.pod = pod
        self.follows = True
        self.is_silent = False
        self.sync_file()
        self.restart()

    @property
    def container(self) -> Object:
        return next(c for c in self.pod["spec"]["initContainers"] if c["name"] == "sidecar")

    @property
    def granted(self) -> int:
        """The limit of its cgroup."""
        (status,) = self.pod["status"]["initContainerStatuses"]
        return int(parse_quantity(status["resources"]["limits"]["memory"]))

    def sync_file(self) -> None:
        """The kubelet writes the annotation into the volume, sooner or later."""
        self.file = int(self.pod["metadata"]["annotations"][MEMORY_SIZE])

    def restart(self) -> None:
        self.size = self.file

    def answer(self) -> Any:
        if self.is_silent:
            return None
        memory = {"size_bytes": self.size, "target_bytes": self.file} if self.follows else {"size_bytes": 1}
        return {"is_ready": True, "num_clients": {"attached": 1}, "memory": memory, "engine": {}}


class Node:
    """A world of running pods, an operator that may die after any write, and time."""

    def __init__(
        self, replicas: int = 1, size: str = "1Gi", world: World | None = None, **engine: Any
    ) -> None:
        self.world: World = world or settled_world(
            engine={"replicas": replicas, **engine}, tiers={"memory": {"size": size}}
        )
        self.sidecars: dict[str, Sidecar] = {}
        self.run_pods()

    def run_pods(self) -> None:
        """Start those that are new."""
        self.world.run_stateful_sets()
        for number, (name, pod) in enumerate(sorted(self.world.pods.items())):
            if "phase" not in pod["status"]:
                ready = [{"type": "Ready", "status": "True"}]
                pod["metadata"] |= {"namespace": NAMESPACE, "generation": 1}
                pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{number}", "conditions": ready}
                self._report(pod)
                self.sidecars[name] = Sidecar(pod)

    # -- what users and time do

    def declare(self, size: str) -> None:
        self.world.change(tiers={"memory": {"size": size}})

    def wait(self, minutes: float) -> None:
        self.world.now += timedelta(minutes=minutes)

    def replace(self, name: str) -> None:
        """Somebody deletes the pod."""
        del self.world.pods[name], self.sidecars[name]
        self.run_pods()

    # -- what the kubelet does

    def answer(self, name: str, verdict: str = "granted") -> None:
        """The kubelet looks at what is asked for, and grants it unless it says otherwise."""
        pod = self.world.pods[name]
        waits = [c for c in pod["status"]["conditions"] if not c["type"].startswith("PodResize")]
        pod["status"]["conditions"] = waits
        limit = _limit(pod)
        if verdict == "granted" and limit > NODE_BYTES:
            verdict = "Infeasible"
        if verdict == "granted":
            assert limit >= sidecar_memory(self.sidecars[name].size), "less than what is in use"
            self._report(pod)
        elif limit != self.sidecars[name].granted:
            said = {"type": "PodResizePending", "status": "True", "reason": verdict, "message": "full"}
            waits.append(said | {"observedGeneration": pod["metadata"]["generation"]})

    def settle(self, name: str, verdict: str = "granted") -> None:
        """Kubelet and sidecar do all that they have to."""
        self.answer(name, verdict)
        self.sidecars[name].sync_file()
        self.sidecars[name].restart()

    def _report(self, pod: Object) -> None:
        (sidecar,) = (c for c in pod["spec"]["initContainers"] if c["name"] == "sidecar")
        pod["status"]["initContainerStatuses"] = [{"name": "sidecar", "resources": sidecar["resources"]}]

    # -- what the operator does

    def operate(self, dies_after: int | None = None) -> list[str]:
        """One reconciliation from what there is now: what it wrote."""
        before = len(self.world.writes)
        observed = observe(self.world, now=self.world.now)
        due = plan(observed, IMAGES)
        mark = _Mortal(self.world, dies_after)
        applier = Applier(mark, ClusterKey(NAMESPACE, NAME, UID), ContestLog(), 0.0, self.ask)  # type: ignore[arg-type]
        with contextlib.suppress(KilledError):
            asyncio.run(applier.carry_out(due, observed))
        assert not applier.problems, applier.problems
        return self.world.writes[before:]

    def due(self) -> Plan:
        return plan(observe(self.world, now=self.world.now), IMAGES)

    def converge(self, rounds: int = 30) -> None:
        """Everybody does what they should, until the operator has nothing more to do."""
        for _ in range(rounds):
            written = self.operate()
            self.run_pods()
            for name in self.sidecars:
                self.settle(name)
            if not written and not self.operate():
                return
        raise AssertionError(f"still writing: {self.operate()}")

    def status(self) -> Object:
        return status_of(self.world, now=self.world.now)

    async def ask(self, address: str) -> Any:
        found = (s for s in self.sidecars.values() if s.pod["status"]["podIP"] == address)
        return next(found).answer()


class _Mortal:
    """A client that dies with its operator after a write."""

    def __init__(self, world: World, num_writes: int | None) -> None:
        self._world, self._left = world, num_writes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._world, name)

        async def made(*args: Any, **options: Any) -> Any:
            answer = await call(*args, **options)
            if self._left is not None:
                self._left -= 1
                if self._left <= 0:
                    raise KilledError
            return answer

        return made


def _limit(pod: Object) -> int:
    (sidecar,) = (c for c in pod["spec"]["initContainers"] if c["name"] == "sidecar")
    return int(parse_quantity(sidecar["resources"]["limits"]["memory"]))


def limits(node: Node) -> dict[str, int]:
    """MiB that the sidecars' containers ask for, by pod."""
    return {name: _limit(pod) // MI for name, pod in node.world.pods.items()}


def told(node: Node) -> dict[str, int]:
    """MiB that the sidecars are told to have."""
    annotations = {name: pod["metadata"]["annotations"] for name, pod in node.world.pods.items()}
    return {name: int(own[MEMORY_SIZE]) // MI for name, own in annotations.items()}


def refused_by(message: str) -> RefusedError:
    return RefusedError("PATCH", message)
