"""An operator that is killed after each of its writes: its successor reaches the state of an undisturbed one.

An operator's effects are its writes, so the cases cover all states that a killed operator can leave. A run
for a change does every third write. Each case has a cluster and a namespace of its own. The engines'
cluster is created, scaled, rolled, resized and deleted. Its GPU claim, which is immutable, is recreated
when the cluster is rolled, and removed in the end. A second cluster changes its pods' memory while they
run, and adds, replaces and removes shards.
"""

import asyncio
import base64
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from kubernetes.aio.client import ApiClient

from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.components.remote import remote, shards
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import ApiError
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.policy.report import Choice
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import BY_NAME, CLUSTER, POD, ClusterKey
from lmcache_operator.specs.names import MEMORY_SIZE, RENDERED_HASH, SPEC_HASH, STOCK_IMAGES, annotations_of
from testing.kube.api import Api, Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, NAME, Operator, example, is_since, new_namespace, since
from tests.harness.operator.autoscaling import GIB, Chooser
from tests.harness.operator.devices import DEVICE_CLASS, published
from tests.harness.scope import third

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
T = TypeVar("T")

SECONDS = 300.0
"""Time for one cluster to settle. An idle machine needs one or two seconds."""
NUM_AT_ONCE = 4
"""Clusters that are reconciled concurrently. A larger number does not shorten the test."""
IDLE_SECONDS = 100.0
"""A reconciler that is due again sooner than this waits for something."""
SIDECAR = {"is_ready": True, "num_clients": {"attached": 1}}
HAS_CLAIMS = is_since("1.34")
ONE_GPU: Object = {"gpu": {"deviceClassName": DEVICE_CLASS} if HAS_CLAIMS else {"count": 0}}
TWO_GPUS: Object = {"gpu": {"count": 2}, "parallelism": {"tensor": 2}} if HAS_CLAIMS else {}
NO_GPU: Object = {"gpu": {"count": 0, "deviceClassName": None}, "parallelism": {"tensor": 1}}
CHOOSER = Chooser(Choice(3 * GIB, 2 * GIB))
SERVER_FIELDS = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
)
SERVICE_FIELDS = ("clusterIP", "clusterIPs")


@dataclass(frozen=True)
class Story:
    """The changes that a cluster goes through."""

    begin: Object
    """The first spec of the cluster."""
    changes: dict[str, Object]
    max_writes: int
    """Maximum number of writes of any change, up to its last write of a child. The number of status writes
    depends on time."""
    num_deleted: dict[str, int] = field(default_factory=dict)
    """Children that each step deletes."""


ENGINES = Story(
    {"engine": ONE_GPU, "tiers": {"memory": {"size": "1Gi"}}},
    {
        "scaled": {"spec": {"engine": {"replicas": 2}}},
        "rolled": {
            "spec": {"engine": {"image": "engine:2"} | TWO_GPUS, "tiers": {"memory": {"size": "2Gi"}}}
        },
        **({"without a claim": {"spec": {"engine": NO_GPU}}} if HAS_CLAIMS else {}),
        # This step must come after the claim's removal: the API server resizes no pod with a claim
        # (kubernetes/kubernetes#138641).
        "sized": {"spec": {"autoscaling": {"mode": "Auto", "memory": {"maxSize": "4Gi"}}}},
    },
    max_writes=12,
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
    max_writes=13,
)


class OperatorKilledError(BaseException):
    """The operator was killed. No code of the operator catches this exception."""


class MortalApi(KubeApi):
    """A client that dies with its operator, after a write whose answer is lost."""

    def __init__(self, client: ApiClient, num_writes: int | None) -> None:
        super().__init__(client)
        self.written: list[tuple[str, str]] = []
        self._num_writes = num_writes

    async def _call(self, verb: str, path: str, *args: Any, **options: Any) -> tuple[int, Any]:
        if self._num_writes is not None and len(self.written) >= self._num_writes:
            raise OperatorKilledError
        answer = await super()._call(verb, path, *args, **options)
        # Events change nothing that an operator reads, and a dry run changes nothing at all.
        is_dry_run = "dryRun" in (options.get("query") or {})
        if verb != "GET" and answer[0] < 300 and "/events" not in path and not is_dry_run:
            self.written.append((verb, re.sub("/namespaces/[^/]+", "", path)))
            if len(self.written) == self._num_writes:
                raise OperatorKilledError
        return answer


class Case:
    """One cluster, with the operators that reconcile it one after the other."""

    def __init__(
        self, story: Story, api: Api, client: ApiClient, namespace: str, dies_after: int | None
    ) -> None:
        self.story, self.api, self.client = story, api, client
        self.namespace, self.dies_after = namespace, dies_after
        self.num_kills = 0
        self.num_writes: dict[str, int] = {}
        """Number of writes of the first operator up to its last write of a child, by step."""

    async def create(self) -> None:
        resource = example(**self.story.begin)
        created = await asyncio.to_thread(self.api.create, CLUSTERS, resource, self.namespace)
        self.key = ClusterKey(self.namespace, NAME, created["metadata"]["uid"])

    async def run(self, step: str) -> Counter[tuple[str, str]]:
        """Run an operator that dies, and its successor. Returns the writes of both, without the status."""
        first = MortalApi(self.client, self.dies_after)
        with contextlib.suppress(OperatorKilledError):
            await self._reconcile(first)
        self.num_kills += len(first.written) == self.dies_after
        self.num_writes[step] = max(
            (number for number, write in enumerate(first.written, start=1) if not _is_status(write)),
            default=0,
        )
        second = MortalApi(self.client, None)
        await self._reconcile(second)
        await self._check_idle(step)
        return Counter(write for write in (*first.written, *second.written) if not _is_status(write))

    async def change(self, step: str) -> None:
        """Apply the user's change. If the shards have a password, change it, too."""
        await asyncio.to_thread(self.api.patch, CLUSTERS, NAME, self.story.changes[step], self.namespace)
        if await self.password():
            new = {"stringData": {"password": step}}
            await asyncio.to_thread(self.api.patch, "v1/secrets", self._secret, new, self.namespace)

    @property
    def _secret(self) -> str:
        return f"{NAME}-remote-{self.key.uid}"

    async def password(self) -> str:
        secret = await asyncio.to_thread(self.api.find, "v1/secrets", self._secret, self.namespace) or {}
        return base64.b64decode(secret.get("data", {}).get("password", "")).decode()

    async def _reconcile(self, api: MortalApi) -> None:
        """Reconcile until several rounds in a row find nothing to do."""
        reconciler, num_quiet, due = self._reconciler(api), 0, 0.0
        async with asyncio.timeout(SECONDS):
            while num_quiet < 3:
                num_before = len(api.written)
                with contextlib.suppress(ApiError):  # such as 409, if a controller was faster
                    due = await reconciler.reconcile(self.key) or 0.0
                is_idle = due > IDLE_SECONDS and len(api.written) == num_before
                is_quiet = is_idle and await self._is_ready()
                num_quiet = num_quiet + 1 if is_quiet else 0
                await asyncio.sleep(0.2)  # real time: polls

    async def _check_idle(self, step: str) -> None:
        """Check that a third operator finds nothing to do."""
        third = MortalApi(self.client, None)
        before = await third.get(CLUSTER, self.namespace, NAME)
        await self._reconciler(third).reconcile(self.key)
        after = await third.get(CLUSTER, self.namespace, NAME)
        assert third.written == [], f"{step}, killed after {self.dies_after}: {before} became {after}"

    async def _is_ready(self) -> bool:
        live = await KubeApi(self.client).get(CLUSTER, self.namespace, NAME)
        assert live is not None
        conditions = {c["type"]: c for c in live.get("status", {}).get("conditions", [])}
        is_observed = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
        return is_observed and conditions["Ready"]["reason"] == "Ready"

    async def pods(self) -> Object:
        """Memory annotation and container resources of each pod, by name."""
        pods = await KubeApi(self.client).find(POD, self.namespace)
        return {
            pod["metadata"]["name"]: (
                annotations_of(pod).get(MEMORY_SIZE),
                [
                    container["resources"]
                    for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
                ],
            )
            for pod in pods
        }

    def _reconciler(self, api: KubeApi) -> Reconciler:
        async def stats(address: str, _: str) -> Object:
            """Statistics of a sidecar that reaches its target size at once."""
            pods = await KubeApi(self.client).find(POD, self.namespace)
            sizes = [
                int(size)
                for pod in pods
                if pod["status"].get("podIP") == address and (size := annotations_of(pod).get(MEMORY_SIZE))
            ]
            memory = {"size_bytes": sizes[0], "target_bytes": sizes[0]} if sizes else {}
            return SIDECAR | {"memory": memory}

        return Reconciler(api, Context(STOCK_IMAGES), stats, autoscaler=CHOOSER)

    async def children(self) -> list[str]:
        """All children, without the fields that differ between any two clusters."""
        api = KubeApi(self.client)
        refs = [ref for component in COMPONENTS for ref in component.refs(NAME)]
        live = [await api.get(BY_NAME[ref.kind], self.namespace, ref.name) for ref in refs]
        return [_normal(child, self.namespace, self.key.uid) for child in live if child is not None]

    async def delete(self) -> None:
        """Delete the cluster. Check that all children disappear and that the operator recreates none."""
        await asyncio.to_thread(self.api.delete, CLUSTERS, NAME, self.namespace)
        last = MortalApi(self.client, None)
        async with asyncio.timeout(SECONDS):
            while await self.children() or await last.find(POD, self.namespace):
                assert await self._reconciler(last).reconcile(self.key) is None
                await asyncio.sleep(0.5)  # real time: polls
        assert await last.get(CLUSTER, self.namespace, NAME) is None
        assert last.written == []


async def in_a_slot(slots: asyncio.Semaphore, work: Awaitable[T]) -> T:
    async with slots:
        return await work


def _is_status(write: tuple[str, str]) -> bool:
    return write[1].endswith("/status")


def _normal(child: Object, namespace: str, uid: str) -> str:
    normal = {key: value for key, value in child.items() if key != "status"}
    normal["metadata"] = {key: value for key, value in child["metadata"].items() if key not in SERVER_FIELDS}
    # This hash and that of the pods cover the owner's uid.
    annotations = {key: value for key, value in annotations_of(child).items() if key != RENDERED_HASH}
    normal["metadata"]["annotations"] = annotations
    if child["kind"] == "Service":
        normal["spec"] = {key: value for key, value in child["spec"].items() if key not in SERVICE_FIELDS}
    normal.get("data", {}).pop("savedIn", None)
    text = re.sub(rf'("{SPEC_HASH}": )"\w+"', r'\1"HASH"', json.dumps(normal, sort_keys=True))
    return text.replace(namespace, "NAMESPACE").replace(uid, "UID")


@pytest.fixture
def alone(plane: Cluster, operator_process: Operator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the test's own operators run, and there are devices for all pods."""
    if operator_process.is_running:
        operator_process.terminate()
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
    per_node = 2 * 2 * (1 + ENGINES.max_writes)
    with published(plane, per_node) if HAS_CLAIMS else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def places(plane: Cluster, name: str, deaths: Sequence[int | None]) -> Iterator[dict[str, int | None]]:
    """Namespaces for cases, with the number of writes after which the operator dies in each."""
    with contextlib.ExitStack() as stack:
        yield {stack.enter_context(new_namespace(plane, f"{name}-{n or 0:02}")): n for n in deaths}


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[ApiClient]:
    async with connect() as api:
        yield api._client


def run_story(story: Story, plane: Cluster, name: str) -> None:
    """Run the cases step by step. Compare each with the first one, whose operator is not killed."""
    with places(plane, name, [None, *third(range(1, story.max_writes + 1))]) as deaths:
        asyncio.run(run_cases(story, plane.api, deaths))


async def run_cases(story: Story, api: Api, deaths: dict[str, int | None]) -> None:
    async with client() as shared:
        slots = asyncio.Semaphore(NUM_AT_ONCE)
        cases = [Case(story, api, shared, place, number) for place, number in deaths.items()]
        for step in ("created", *story.changes):
            change = [case.create() if step == "created" else case.change(step) for case in cases]
            await asyncio.gather(*change)
            written = await asyncio.gather(*(in_a_slot(slots, case.run(step)) for case in cases))
            is_change = step in story.changes
            assert not is_change or cases[0].num_writes[step] <= story.max_writes
            deleted = [path for verb, path in written[0] if verb == "DELETE"]
            assert len(deleted) == story.num_deleted.get(step, 0)
            undisturbed, *killed = [(await case.children(), await case.pods()) for case in cases]
            for case, (children, pods), writes in zip(cases[1:], killed, written[1:], strict=True):
                where = f"{step}, killed after write {case.dies_after}"
                for child, expected in zip(children, undisturbed[0], strict=True):
                    assert child == expected, where
                assert pods == undisturbed[1], where
                repeated = [write for write, times in writes.items() if times > max(1, written[0][write])]
                assert repeated == [], where
                if is_change:
                    assert await case.password() == (step if "remote" in story.begin["tiers"] else ""), where
        num_writes = max(cases[0].num_writes.values())
        assert all(case.num_kills for case in cases[1:] if case.dies_after <= num_writes)
        await asyncio.gather(*(case.delete() for case in cases))


def test_successor_of_a_killed_operator_completes_and_repeats_no_write(plane, alone):
    run_story(ENGINES, plane, "killed")


@since("1.35")
def test_tier_changes_survive_an_operator_killed_after_any_write(plane, alone, monkeypatch):
    for module in (remote, shards):
        monkeypatch.setattr(module, "WINDOW", timedelta(seconds=1))
    run_story(TIERS, plane, "tiers")


def test_cluster_deleted_while_its_operator_is_dead_leaves_nothing(plane, alone):
    async def scenario(deaths: dict[str, int | None]) -> None:
        async with client() as shared:
            cases = [Case(ENGINES, plane.api, shared, place, number) for place, number in deaths.items()]
            await asyncio.gather(*(case.create() for case in cases))
            for case in cases:
                with contextlib.suppress(OperatorKilledError):
                    await case._reconcile(MortalApi(shared, case.dies_after))
            await asyncio.gather(*(case.delete() for case in cases))

    with places(plane, "half-made", third(range(1, 10))) as deaths:
        asyncio.run(scenario(deaths))
