"""The operator is killed after each of its writes: the next one ends where an undisturbed one does.

What an operator has done is what it has written, so these are all the states that one can leave behind. Each
write has a cluster of its own, in a namespace of its own, that is made, scaled, rolled, sized, deleted. Its
claim for GPUs, which nobody can change, is deleted and made anew when it is rolled, and given up in the end.
Another one's pods get more memory and less while they run, and its shards come, are replaced and go.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from kubernetes.aio.client import ApiClient
from lmcache_operator.autoscaling.report import Choice, Report
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Context, Observed
from lmcache_operator.components.remote import remote, shards
from lmcache_operator.errors import ApiError
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import BY_NAME, CLUSTER, POD, ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE, RENDERED_HASH, STOCK_IMAGES, annotations_of

from testing.kube.api import Api, Object
from testing.kube.cluster import Cluster
from tests.harness.autoscaling import GIB
from tests.harness.devices import DEVICE_CLASS, published
from tests.harness.kube import CLUSTERS, NAME, Operator, example, is_since, new_namespace, since

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
T = TypeVar("T")

SECONDS = 300.0
"""For one cluster to come to rest; on an idle machine it takes one or two."""
NUM_AT_ONCE = 4
"""Clusters that are worked on; more take no less time in all."""
REST_SECONDS = 100.0
"""Whoever is due again sooner waits for something."""
SIDECAR = {"is_ready": True, "num_clients": {"attached": 1}}
HAS_CLAIMS = is_since("1.34")
ONE_GPU: Object = {"gpu": {"deviceClassName": DEVICE_CLASS} if HAS_CLAIMS else {"count": 0}}
TWO_GPUS: Object = {"gpu": {"count": 2}, "parallelism": {"tensor": 2}} if HAS_CLAIMS else {}
NO_GPU: Object = {"gpu": {"count": 0, "deviceClassName": None}, "parallelism": {"tensor": 1}}
SECRET = f"{NAME}-remote"
OF_THE_SERVER = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
)
OF_THE_SERVICE = ("clusterIP", "clusterIPs")


@dataclass(frozen=True)
class Story:
    """What becomes of a cluster."""

    begin: Object
    """Its spec."""
    changes: dict[str, Object]
    num_cases: int
    """More than any change has writes up to the last of a child; how often a status is told is a matter of
    time."""
    num_deleted: dict[str, int] = field(default_factory=dict)
    """Children that a step deletes."""


ENGINES = Story(
    {"engine": ONE_GPU, "tiers": {"memory": {"size": "1Gi"}}},
    {
        "scaled": {"spec": {"engine": {"replicas": 2}}},
        "rolled": {
            "spec": {"engine": {"image": "engine:2"} | TWO_GPUS, "tiers": {"memory": {"size": "2Gi"}}}
        },
        **({"without a claim": {"spec": {"engine": NO_GPU}}} if HAS_CLAIMS else {}),
        # After that: the API server resizes no pod with a claim (kubernetes/kubernetes#138641).
        "sized": {"spec": {"autoscaling": {"mode": "Auto", "memory": {"maxSize": "4Gi"}}}},
    },
    num_cases=15,
    num_deleted={"rolled": 1, "without a claim": 1} if HAS_CLAIMS else {},
)


def tiers(memory: str, shards: int, shard: str) -> Object:
    return {"memory": {"size": memory}, "remote": {"managed": {"shards": shards, "memoryPerShard": shard}}}


TIERS = Story(
    {"engine": {"replicas": 1, "gpu": {"count": 0}}, "tiers": tiers("1Gi", 1, "1Gi")},
    {
        "grown": {"spec": {"tiers": tiers("2Gi", 2, "2Gi")}},
        "shrunk": {"spec": {"tiers": tiers("1Gi", 1, "2Gi")}},
    },
    num_cases=14,
)


class KilledError(BaseException):
    """The operator is no more; nothing of it catches this."""


class MortalApi(KubeApi):
    """A client that dies with its operator, after a write whose answer nobody hears."""

    def __init__(self, client: ApiClient, num_writes: int | None) -> None:
        super().__init__(client)
        self.written: list[tuple[str, str]] = []
        self._num_writes = num_writes

    async def _call(self, verb: str, path: str, *args: Any, **options: Any) -> tuple[int, Any]:
        if self._num_writes is not None and len(self.written) >= self._num_writes:
            raise KilledError
        answer = await super()._call(verb, path, *args, **options)
        # Events change nothing that an operator looks at, and what is only tried changes nothing at all.
        is_tried = "dryRun" in (options.get("query") or {})
        if verb != "GET" and answer[0] < 300 and "/events" not in path and not is_tried:
            self.written.append((verb, re.sub("/namespaces/[^/]+", "", path)))
            if len(self.written) == self._num_writes:
                raise KilledError
        return answer


class Case:
    """One cluster, and the operators that work on it one after the other."""

    def __init__(
        self, story: Story, api: Api, client: ApiClient, namespace: str, dies_after: int | None
    ) -> None:
        self.story, self.api, self.client = story, api, client
        self.namespace, self.dies_after = namespace, dies_after
        self.was_killed: dict[str, bool] = {}
        self.left_undone: dict[str, bool] = {}
        """Whether the one that was killed had not yet written all but the status."""

    async def create(self) -> None:
        resource = example(**self.story.begin)
        created = await asyncio.to_thread(self.api.create, CLUSTERS, resource, self.namespace)
        self.key = ClusterKey(self.namespace, NAME, created["metadata"]["uid"])

    async def run(self, step: str) -> Counter[tuple[str, str]]:
        """An operator that dies, and the next; what the two have written, the status left out."""
        first = MortalApi(self.client, self.dies_after)
        with contextlib.suppress(KilledError):
            await self._reconcile(first)
        self.was_killed[step] = len(first.written) == self.dies_after
        second = MortalApi(self.client, None)
        await self._reconcile(second)
        await self._is_at_rest(step)
        own, left = _without_status(first.written), _without_status(second.written)
        self.left_undone[step] = bool(left)
        return Counter([*own, *left])

    async def change(self, step: str) -> None:
        """By the user, who also changes the password of the shards, if there is one."""
        await asyncio.to_thread(self.api.patch, CLUSTERS, NAME, self.story.changes[step], self.namespace)
        if await self.password():
            new = {"stringData": {"password": step}}
            await asyncio.to_thread(self.api.patch, "v1/secrets", SECRET, new, self.namespace)

    async def password(self) -> str:
        secret: Object = await asyncio.to_thread(self.api.find, "v1/secrets", SECRET, self.namespace) or {}
        return base64.b64decode(secret.get("data", {}).get("password", "")).decode()

    async def _reconcile(self, api: MortalApi) -> None:
        """As the operator does it, until several looks in a row find nothing more to do."""
        reconciler, num_quiet, due = self._reconciler(api), 0, 0.0
        async with asyncio.timeout(SECONDS):
            while num_quiet < 3:
                num_before = len(api.written)
                with contextlib.suppress(ApiError):  # as 409, where a controller was quicker
                    due = await reconciler.reconcile(self.key) or 0.0
                has_time = due > REST_SECONDS and len(api.written) == num_before
                is_quiet = has_time and await self._is_ready()
                num_quiet = num_quiet + 1 if is_quiet else 0
                await asyncio.sleep(0.2)

    async def _is_at_rest(self, step: str) -> None:
        """Another operator finds nothing to do."""
        third = MortalApi(self.client, None)
        before = await third.get(CLUSTER, self.namespace, NAME)
        await self._reconciler(third).reconcile(self.key)
        after = await third.get(CLUSTER, self.namespace, NAME)
        assert third.written == [], f"{step}, killed after {self.dies_after}: {before} became {after}"

    async def _is_ready(self) -> bool:
        live = await KubeApi(self.client).get(CLUSTER, self.namespace, NAME)
        assert live is not None
        found = {c["type"]: c for c in live.get("status", {}).get("conditions", [])}
        is_seen = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
        return is_seen and found["Ready"]["status"] == "True"

    async def pods(self) -> Object:
        """The memory of their containers, and what they are told to use."""
        found = await KubeApi(self.client).find(POD, self.namespace)
        return {
            pod["metadata"]["name"]: (
                annotations_of(pod).get(MEMORY_SIZE),
                [
                    own["resources"]
                    for own in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
                ],
            )
            for pod in found
        }

    def _reconciler(self, api: KubeApi) -> Reconciler:
        async def stats(address: str) -> Object:
            """Of a sidecar that has at once what it is told."""
            found = await KubeApi(self.client).find(POD, self.namespace)
            sizes = [
                int(size)
                for pod in found
                if pod["status"].get("podIP") == address and (size := annotations_of(pod).get(MEMORY_SIZE))
            ]
            memory = {"size_bytes": sizes[0], "target_bytes": sizes[0]} if sizes else {}
            return SIDECAR | {"memory": memory}

        return Reconciler(api, Context(STOCK_IMAGES), stats, autoscaler=Chooser())

    async def children(self) -> list[str]:
        """All of them, without what differs between any two clusters."""
        api = KubeApi(self.client)
        refs = [ref for own in COMPONENTS for ref in own.refs(NAME)]
        found = [await api.get(BY_NAME[ref.kind], self.namespace, ref.name) for ref in refs]
        return [_normal(child, self.namespace) for child in found if child is not None]

    async def delete(self) -> None:
        """Nothing is left, and the operator makes nothing anew."""
        await asyncio.to_thread(self.api.delete, CLUSTERS, NAME, self.namespace)
        last = MortalApi(self.client, None)
        async with asyncio.timeout(SECONDS):
            while await self.children() or await last.find(POD, self.namespace):
                assert await self._reconciler(last).reconcile(self.key) is None
                await asyncio.sleep(0.5)
        assert await last.get(CLUSTER, self.namespace, NAME) is None
        assert last.written == []


class Chooser:
    """Of whoever has it sized, the same as the operator before."""

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        is_auto = observed["autoscaling"].resource["spec"]["autoscaling"]["mode"] == "Auto"
        return Report({}, memory=Choice(3 * GIB, 2 * GIB), state="counted") if is_auto else None

    def forget(self, key: ClusterKey) -> None:
        """Nothing is remembered."""


async def one_of(slots: asyncio.Semaphore, work: Awaitable[T]) -> T:
    async with slots:
        return await work


def _without_status(written: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [write for write in written if not write[1].endswith("/status")]


def _normal(child: Object, namespace: str) -> str:
    kept = {key: value for key, value in child.items() if key != "status"}
    kept["metadata"] = {key: value for key, value in child["metadata"].items() if key not in OF_THE_SERVER}
    # A hash of all that was rendered, the owner's uid in it.
    annotations = {key: value for key, value in annotations_of(child).items() if key != RENDERED_HASH}
    kept["metadata"]["annotations"] = annotations
    if child["kind"] == "Service":
        kept["spec"] = {key: value for key, value in child["spec"].items() if key not in OF_THE_SERVICE}
    kept.get("data", {}).pop("savedIn", None)
    return json.dumps(kept, sort_keys=True).replace(namespace, "NAMESPACE")


@pytest.fixture
def alone(plane: Cluster, operator_process: Operator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """No operator runs but those of the test, and there are devices for all of its pods."""
    if operator_process.is_running:
        operator_process.terminate()
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    with published(plane, per_node=2 * 2 * ENGINES.num_cases) if HAS_CLAIMS else contextlib.nullcontext():
        yield plane.api


@contextlib.contextmanager
def namespaces(plane: Cluster, name: str, number: int) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(new_namespace(plane, f"{name}-{n:02}")) for n in range(number)]


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[ApiClient]:
    async with connect() as api:
        yield api._client


async def live_through(story: Story, api: Api, places: list[str]) -> None:
    """All cases at once, step by step; each is compared with that of an operator that is not killed."""
    async with client() as shared:
        slots = asyncio.Semaphore(NUM_AT_ONCE)
        cases = [Case(story, api, shared, place, n or None) for n, place in enumerate(places)]
        for step in ("created", *story.changes):
            change = [case.create() if step == "created" else case.change(step) for case in cases]
            await asyncio.gather(*change)
            written = await asyncio.gather(*(one_of(slots, case.run(step)) for case in cases))
            assert [case.was_killed[step] for case in cases[1:3]] == [True, True]
            is_change = step in story.changes
            assert not (is_change and cases[-1].left_undone[step]), "it has more writes than there are cases"
            deleted = [path for verb, path in written[0] if verb == "DELETE"]
            assert len(deleted) == story.num_deleted.get(step, 0)
            undisturbed, *others = [(await case.children(), await case.pods()) for case in cases]
            for case, (children, pods), writes in zip(cases[1:], others, written[1:], strict=True):
                where = f"{step}, killed after write {case.dies_after}"
                for own, wanted in zip(children, undisturbed[0], strict=True):
                    assert own == wanted, where
                assert pods == undisturbed[1], where
                twice = [write for write, times in writes.items() if times > max(1, written[0][write])]
                assert twice == [], where
                if is_change:
                    assert await case.password() == (step if "remote" in story.begin["tiers"] else ""), where
        await asyncio.gather(*(case.delete() for case in cases))


def test_an_operator_killed_after_any_write_leaves_nothing_undone_or_done_twice(plane, alone):
    with namespaces(plane, "killed", ENGINES.num_cases) as places:
        asyncio.run(live_through(ENGINES, alone, places))


@since("1.35")
def test_tiers_outlive_an_operator_killed_after_any_write(plane, alone, monkeypatch):
    for module in (remote, shards):
        monkeypatch.setattr(module, "WINDOW", timedelta(seconds=1))
    with namespaces(plane, "tiers", TIERS.num_cases) as places:
        asyncio.run(live_through(TIERS, alone, places))


def test_a_cluster_deleted_while_its_operator_is_dead_leaves_nothing(plane, alone):
    async def scenario(places: list[str]) -> None:
        async with client() as shared:
            cases = [Case(ENGINES, alone, shared, place, n) for n, place in enumerate(places, start=1)]
            await asyncio.gather(*(case.create() for case in cases))
            for case in cases:
                with contextlib.suppress(KilledError):
                    await case._reconcile(MortalApi(shared, case.dies_after))
            await asyncio.gather(*(case.delete() for case in cases))

    with namespaces(plane, "half-made", 9) as places:
        asyncio.run(scenario(places))
