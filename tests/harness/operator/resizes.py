"""Pods whose memory tiers are resized, with their kubelets and sidecars."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from lmcache_operator.contract.base import Plan
from lmcache_operator.errors import RefusedError
from lmcache_operator.pods.resize import sidecar_memory
from lmcache_operator.reconcile.apply import Applier
from lmcache_operator.reconcile.contest import ContestLog
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from lmcache_store.common.units import parse_quantity
from tests.harness.operator.model import NAME, NAMESPACE, UID, Object, World
from tests.harness.operator.plans import observe, plan, settled_world, status_of

MI = 2**20
NODE_BYTES = 6 << 30
"""Memory limit of one sidecar on a node of these worlds."""


class KilledError(BaseException):
    """The operator was killed. No code of the operator catches this exception."""


class Sidecar:
    """A sidecar that applies the size in its file at once, without regard to its limit."""

    def __init__(self, pod: Object) -> None:
        self.pod = pod
        self.is_following = True
        self.is_silent = False
        self.sync_file()
        self.restart()

    @property
    def granted(self) -> int:
        """The memory limit of its cgroup."""
        (status,) = self.pod["status"]["initContainerStatuses"]
        return int(parse_quantity(status["resources"]["limits"]["memory"]))

    def sync_file(self) -> None:
        """Write the annotation into the volume, as the kubelet does with a delay."""
        self.file = int(self.pod["metadata"]["annotations"][MEMORY_SIZE])

    def restart(self) -> None:
        self.size = self.file

    def answer(self) -> Any:
        if self.is_silent:
            return None
        memory = (
            {"size_bytes": self.size, "target_bytes": self.file} if self.is_following else {"size_bytes": 1}
        )
        return {"is_ready": True, "num_clients": {"attached": 1}, "memory": memory, "engine": {}}


class Node:
    """A world of running pods, an operator that may die after any write, and a clock."""

    def __init__(
        self, replicas: int = 1, size: str = "1Gi", world: World | None = None, **engine: Any
    ) -> None:
        self.world: World = world or settled_world(
            engine={"replicas": replicas, **engine}, tiers={"memory": {"size": size}}
        )
        self.sidecars: dict[str, Sidecar] = {}
        self.run_pods()

    def run_pods(self) -> None:
        """Start new pods."""
        self.world.run_stateful_sets()
        for number, (name, pod) in enumerate(sorted(self.world.pods.items())):
            if "phase" not in pod["status"]:
                ready = [{"type": "Ready", "status": "True"}]
                pod["metadata"] |= {"namespace": NAMESPACE, "generation": 1}
                pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{number}", "conditions": ready}
                self._report(pod)
                self.sidecars[name] = Sidecar(pod)

    # -- users and time

    def declare(self, size: str) -> None:
        self.world.change(tiers={"memory": {"size": size}})

    def wait(self, minutes: float) -> None:
        self.world.now += timedelta(minutes=minutes)

    def replace(self, name: str) -> None:
        """Delete the pod, and start its replacement."""
        del self.world.pods[name], self.sidecars[name]
        self.run_pods()

    # -- the kubelet

    def answer(self, name: str, verdict: str = "granted") -> None:
        """Answer the pod's resize request as the kubelet: granted unless ``verdict`` says otherwise."""
        pod = self.world.pods[name]
        conditions = [c for c in pod["status"]["conditions"] if not c["type"].startswith("PodResize")]
        pod["status"]["conditions"] = conditions
        limit = _limit(pod)
        if verdict == "granted" and limit > NODE_BYTES:
            verdict = "Infeasible"
        if verdict == "granted":
            assert limit >= sidecar_memory(self.sidecars[name].size), "the limit is below the used memory"
            self._report(pod)
        elif limit != self.sidecars[name].granted:
            pending = {"type": "PodResizePending", "status": "True", "reason": verdict, "message": "full"}
            conditions.append(pending | {"observedGeneration": pod["metadata"]["generation"]})

    def settle(self, name: str, verdict: str = "granted") -> None:
        """Let kubelet and sidecar finish their work."""
        self.answer(name, verdict)
        self.sidecars[name].sync_file()
        self.sidecars[name].restart()

    def _report(self, pod: Object) -> None:
        (sidecar,) = (c for c in pod["spec"]["initContainers"] if c["name"] == "sidecar")
        pod["status"]["initContainerStatuses"] = [{"name": "sidecar", "resources": sidecar["resources"]}]

    # -- the operator

    def operate(self, dies_after: int | None = None) -> list[str]:
        """Reconcile once from the current state. Returns the writes."""
        num_before = len(self.world.writes)
        observed = observe(self.world, now=self.world.now)
        due = plan(observed, IMAGES)
        mortal = _Mortal(self.world, dies_after)
        applier = Applier(mortal, ClusterKey(NAMESPACE, NAME, UID), ContestLog(), 0.0, self.ask)
        with contextlib.suppress(KilledError):
            asyncio.run(applier.carry_out(due, observed))
        assert not applier.problems, applier.problems
        return self.world.writes[num_before:]

    def due(self) -> Plan:
        return plan(observe(self.world, now=self.world.now), IMAGES)

    def converge(self) -> None:
        """Run operator, kubelet and sidecars, until the operator has nothing left to do."""
        for _ in range(30):
            written = self.operate()
            self.run_pods()
            for name in self.sidecars:
                self.settle(name)
            if not written and not self.operate():
                return
        raise AssertionError(f"still writing: {self.operate()}")

    def status(self) -> Object:
        return status_of(self.world, now=self.world.now)

    async def ask(self, address: str, _uid: str = "") -> Any:
        answers = (s for s in self.sidecars.values() if s.pod["status"]["podIP"] == address)
        return next(answers).answer()


class _Mortal:
    """A client that dies with its operator after a write."""

    def __init__(self, world: World, num_writes: int | None) -> None:
        self._world, self._left = world, num_writes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._world, name)

        async def call_and_count(*args: Any, **options: Any) -> Any:
            answer = await call(*args, **options)
            if self._left is not None:
                self._left -= 1
                if self._left <= 0:
                    raise KilledError
            return answer

        return call_and_count


def _limit(pod: Object) -> int:
    (sidecar,) = (c for c in pod["spec"]["initContainers"] if c["name"] == "sidecar")
    return int(parse_quantity(sidecar["resources"]["limits"]["memory"]))


def limits(node: Node) -> dict[str, int]:
    """Requested memory of the sidecars' containers in MiB, by pod."""
    return {name: _limit(pod) // MI for name, pod in node.world.pods.items()}


def annotated_sizes(node: Node) -> dict[str, int]:
    """Annotated sizes of the memory tiers in MiB, by pod."""
    annotations = {name: pod["metadata"]["annotations"] for name, pod in node.world.pods.items()}
    return {name: int(values[MEMORY_SIZE]) // MI for name, values in annotations.items()}


def refused_by(message: str) -> RefusedError:
    return RefusedError("PATCH", message)
