"""Operators of several releases that overlap: at most one of them works in a namespace at any time."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_operator import election, metrics
from lmcache_operator.election import Elector, LeaseName
from lmcache_operator.errors import ApiError, LeaseLostError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.measures import measure
from lmcache_operator.shared_leases import ALL, SharedLeases, _lease_in
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import ClusterKey
from tests.harness.jumping_loop import now, run
from tests.harness.operator.leases import Connection, LeaseServer, troubles
from tests.harness.scope import examples

NAMESPACES = ("a", "b")
TAKEOVER_SECONDS = 36
"""Maximum time until an operator works without another: its own Lease and a shared one are 15 s old."""
OVERLAP_SECONDS = 110
"""Maximum time until an operator of all namespaces works where another release worked: 60 s, and polls."""


class Servers(defaultdict[LeaseName, LeaseServer]):
    """An API server with Leases."""

    def __init__(self) -> None:
        super().__init__(LeaseServer)


class Process:
    """A pod of a release. It is restarted whenever it ends, and works in its namespaces all the time."""

    def __init__(
        self, servers: Servers, release: str, *namespaces: str, number: int = 0, name: str = "operator"
    ) -> None:
        self.release, self.namespaces, self.number = LeaseName(release, name), namespaces, number
        self.connection, self.ended, self.is_working = Connection(servers), asyncio.Event(), False
        self.shared = self._new()
        self.task = asyncio.create_task(self._run())

    def _new(self) -> SharedLeases:
        api = cast(KubeApi, self.connection)
        identities = map("{}_{}".format, itertools.repeat(self.number), itertools.count())
        leader = Elector(api, self.release, next(identities), clock=lambda: now() + 1000.0 * self.number)
        return SharedLeases(api, leader, self.namespaces)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(LeaseLostError):
                await self.shared.lead(self._work)
            self.ended.clear()
            self.shared = self._new()

    async def _work(self) -> None:
        self.is_working = True
        lanes = [asyncio.create_task(self._serve(name)) for name in self.namespaces or NAMESPACES]
        try:
            await self.ended.wait()
        finally:
            self.is_working = False
            for lane in lanes:
                lane.cancel()

    async def _serve(self, namespace: str) -> None:
        async def reconcile(_: ClusterKey) -> float:
            for _second in range(40):  # longer than a Lease lasts
                await asyncio.sleep(1)
                await self.shared.renew(url_in(namespace))
            return 1.0

        work = self.shared.guarded(reconcile)
        while True:
            delay: float | None = 1.0
            with contextlib.suppress(ApiError):
                delay = await work(ClusterKey(namespace, "name", "uid"))
            await asyncio.sleep(delay or 0)

    def may_write(self, namespace: str) -> bool:
        return self.is_working and self.shared.seconds_left(url_in(namespace)) > 0


def url_in(namespace: str) -> str:
    return f"https://api/api/v1/namespaces/{namespace}/pods/p?force=true"


def writers(processes: list[Process], namespace: str) -> list[Process]:
    return [process for process in processes if process.may_write(namespace)]


def check(processes: list[Process]) -> None:
    for namespace in NAMESPACES:
        assert len(writers(processes, namespace)) <= 1, namespace


async def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = now() + seconds
    while not condition():
        assert now() < deadline, f"not after {seconds} s"
        await asyncio.sleep(0.25)


def end(process: Process) -> None:
    """End a process like one whose release is uninstalled: it loses its rights before it releases a Lease."""
    process.task.cancel()
    process.connection.trouble = lambda: -1.0


STEPS = ("ok", "slow", "lossy", "freeze", "kill", "stop", "upgrade", "foreign", "empty", "delete")


@settings(max_examples=examples(80))
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.floats(0, 90)), max_size=12),
    st.lists(st.sampled_from([(), ("a",), ("a", "b")]), min_size=3, max_size=3),
    st.integers(0, 2**32).map(Random),
    st.sampled_from([5.0, 1000.0]),
)
def test_at_most_one_operator_works_in_a_namespace(steps, choices, random, try_seconds):
    """Three releases, of which one has two pods. An upgrade changes the namespaces of a release."""

    async def body() -> None:
        servers = Servers()
        releases = [("one", choices[0]), ("one", choices[0]), ("other", choices[1]), ("third", choices[2])]
        processes = [Process(servers, name, *chosen, number=i) for i, (name, chosen) in enumerate(releases)]

        async def watch() -> None:
            while True:
                check(processes)
                await asyncio.sleep(0.25)

        watching = asyncio.create_task(watch())
        for step, number, seconds in steps:
            take_step(step, servers, processes[number], random)
            await asyncio.sleep(seconds)
        for process in processes:
            process.connection.trouble = lambda: 0.0
        await wait_for(lambda: len(writers(processes, "a")) == 1, 60 + OVERLAP_SECONDS)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert watching.cancelled(), watching.exception()
        for process in processes:
            assert not process.task.done(), process.task
            process.task.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(election, "_TRY_SECONDS", try_seconds)
        run(body())


def take_step(step: str, servers: Servers, process: Process, random: Random) -> None:
    if trouble := troubles(random).get(step):
        process.connection.trouble = trouble
    elif step in ("stop", "upgrade"):
        if step == "upgrade":
            process.namespaces = random.choice([(), ("a",), ("a", "b")])
        process.ended.set()
    else:
        # Nobody deletes the Lease of a namespace by hand: ADR 56 says what happens then.
        names = [name for name in servers if step != "delete" or name.namespace not in NAMESPACES]
        server = servers[random.choice(names)] if names else LeaseServer()
        edits: dict[str, Callable[[], object]] = {
            "foreign": lambda: server.edit(holderIdentity="another program"),
            "empty": lambda: server.lease and server.put(server.lease | {"spec": {}}),
            "delete": lambda: server.put(None),
        }
        edits[step]()


FOUR = [((), ()), ((), ("a",)), (("a",), ()), (("a",), ("a", "b"))]
"""Namespaces of the first and of the second release; none: all."""


@pytest.mark.parametrize(("first", "second"), FOUR)
def test_second_release_works_only_where_no_other_one_does(first, second):
    async def body() -> None:
        servers = Servers()
        processes = [Process(servers, "one", *first)]
        await wait_for(lambda: processes[0].may_write("a"), TAKEOVER_SECONDS)
        processes.append(Process(servers, "other", *second, number=1))
        for _ in range(400):
            check(processes)
            await asyncio.sleep(0.25)
        # A list of namespaces has priority over all namespaces.
        winner = int(first == () and second != ())
        assert writers(processes, "a") == [processes[winner]]
        if "b" in second or () in (first, second):
            assert bool(writers(processes, "b")) == ((first, second) != (("a",), ("a",)))
        end(processes[winner])
        await wait_for(lambda: processes[1 - winner].may_write("a"), OVERLAP_SECONDS)
        end(processes[1 - winner])

    run(body())


@pytest.mark.parametrize("namespaces", [(), ("a",)])
def test_release_with_the_name_of_the_chart_works_in_its_own_namespace(namespaces):
    """A release whose Lease is `a/lmcache-operator`."""

    async def body() -> None:
        process = Process(Servers(), "a", *namespaces, name="lmcache-operator")
        await wait_for(lambda: process.may_write("a"), TAKEOVER_SECONDS)
        end(process)

    run(body())


def test_next_leader_of_a_release_works_at_once():
    for namespaces in ((), ("a",)):

        async def body(namespaces: tuple[str, ...] = namespaces) -> None:
            servers = Servers()
            pair = [Process(servers, "one", *namespaces, number=number) for number in range(2)]
            await wait_for(lambda: bool(writers(pair, "a")), 18)  # the first of all: both Leases are new
            (leader,) = writers(pair, "a")
            leader.ended.set()
            await asyncio.sleep(0)
            await wait_for(lambda: bool(writers(pair, "a")), 4)
            (leader,) = writers(pair, "a")
            (standby,) = {*pair} - {leader}
            end(leader)
            await wait_for(lambda: standby.may_write("a"), 18)
            end(standby)

        run(body())


def test_deleted_clusters_of_a_namespace_do_not_disturb_others():
    """Each deleted cluster forgets the Lease of its namespace, which others are just looking for."""

    async def body() -> None:
        servers, num_runs = Servers(), itertools.count()
        process = Process(servers, "one")
        await wait_for(lambda: process.may_write("a"), TAKEOVER_SECONDS)

        async def delete(_: ClusterKey) -> None:
            next(num_runs)

        work = process.shared.guarded(delete)
        process.connection.trouble = lambda: 1.0
        await asyncio.sleep(3)
        deleting = []
        for number in range(10):
            deleting.append(asyncio.create_task(work(ClusterKey("a", f"{number}", "uid"))))
            await asyncio.sleep(0.5)
        assert await asyncio.gather(*deleting) == [None] * 10
        assert next(num_runs) == 10
        end(process)

    run(body())


def test_cluster_of_a_lost_namespace_has_no_metrics_any_more():
    async def body() -> None:
        servers = Servers()
        process = Process(servers, "one")
        await wait_for(lambda: process.may_write("a"), TAKEOVER_SECONDS)
        key = ClusterKey("a", "lost", "uid")
        measure(key, {"conditions": [{"type": "Ready", "status": "True"}]})

        async def reconcile(_: ClusterKey) -> float:
            raise AssertionError("another operator serves the namespace")

        other = Process(servers, "two", "a")
        await wait_for(lambda: other.may_write("a"), OVERLAP_SECONDS)
        assert await process.shared.guarded(reconcile)(key)
        samples = next(iter(metrics.CONDITION.collect())).samples
        assert [sample for sample in samples if sample.labels["name"] == "lost"] == []
        end(process)
        end(other)

    run(body())


def test_abandoned_lease_with_a_finalizer_still_excludes():
    """A Lease with finalizers remains after its deletion, so another operator may take it at any time."""

    class WithFinalizer(LeaseServer):
        def put(self, lease: Object | None, version: str | None = None) -> Object | None:
            return super().put(lease or self.lease, version)

    async def body() -> None:
        servers = Servers()
        lease = _lease_in("a")
        servers[lease] = WithFinalizer()
        servers[lease].put({"metadata": lease._asdict(), "spec": {"holderIdentity": "x/y"}})
        process = Process(servers, "one")
        await wait_for(lambda: process.may_write("b"), TAKEOVER_SECONDS)
        for _ in range(200):
            assert not process.may_write("a")
            await asyncio.sleep(1)
        end(process)

    run(body())


def test_operator_without_its_right_on_a_shared_lease_stands_by_and_says_why(caplog):
    async def body() -> None:
        servers = Servers()
        process = Process(servers, "one")
        servers[ALL].put(
            {"metadata": {"name": ALL.name, "namespace": ALL.namespace}, "spec": {"holderIdentity": "x/y"}}
        )
        renewing = asyncio.create_task(renew(servers[ALL]))
        await asyncio.sleep(60)
        assert writers([process], "a") == []
        renewing.cancel()
        end(process)

    async def renew(server: LeaseServer) -> None:
        while True:
            server.edit()
            await asyncio.sleep(2)

    with caplog.at_level("WARNING"):
        run(body())
    (message,) = [record.message for record in caplog.records if "standing by" in record.message]
    assert message.startswith(
        "standing by: Lease default/lmcache-operator-all-namespaces is held by x/y. Two"
    )
