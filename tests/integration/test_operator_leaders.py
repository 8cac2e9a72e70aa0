"""Two operators on a real API server: one works, whatever happens to it, to the other, or to the Lease.

Meanwhile the cluster is changed all the time, so that whoever leads writes all the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from itertools import pairwise

import pytest

from testing.child_process import ProcessDied
from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import SYSTEM_NAMESPACE, chart_flags
from tests.harness.kube import CLUSTERS, NAME, SERVICE_ACCOUNT, Operator, example, new_namespace

pytestmark = pytest.mark.kube

LEASES = "coordination.k8s.io/v1/leases"
LEASE = SERVICE_ACCOUNT
PATIENCE = 240.0
"""Seconds; what a change of the leader may take is held by ``python -m benchmarks failover``."""
LOST = 3
"""Exit status of an operator that another one has followed.

Where a machine stalls for longer than the Lease is good for, that is lawful at any time: no test may ask for
the leader of before.
"""
LEADING = "leading as"


class Pair:
    """Two operators, and how to look at them. One that has ended is started again, as in its pod."""

    def __init__(self, plane: Cluster, processes: list[Operator], namespace: str) -> None:
        self.plane, self.processes, self.namespace = plane, processes, namespace
        self.mark = plane.mark()
        self._log_starts: dict[Operator, int] = {}

    def start(self, but: Operator | None = None, *, statuses: tuple[int, ...] = (LOST,)) -> None:
        """Those that are not running; they may have ended by themselves with one of these ``statuses``."""
        for process in self.processes:
            if process is but or process.is_running:
                continue
            try:
                process.check()
            except ProcessDied:
                if process.wait() not in statuses:
                    raise
            self._log_starts[process] = len(process.log)
            process.start()

    def log(self, process: Operator) -> str:
        """Of its present life."""
        return process.log[self._log_starts[process] :]

    def lease(self) -> Object:
        found: Object = self.plane.api.get(LEASES, LEASE, SYSTEM_NAMESPACE)
        return found

    def holder(self) -> Operator | None:
        """Whose name is in the Lease."""
        identity = str(self.lease()["spec"].get("holderIdentity"))
        return next((p for p in self.processes if identity.startswith(f"{p.log_path.parent.name}_")), None)

    def leader(self, but: Operator | None = None, *, statuses: tuple[int, ...] = (LOST,)) -> Operator:
        """Who is the first to write from now on; ``but`` is not started, and not meant."""
        mark = self.plane.mark()

        def by_token() -> Operator | None:
            self.start(but, statuses=statuses)
            tokens = {process.token: process for process in self.processes if process is not but}
            writes = self.plane.written_since(mark, namespace=self.namespace)
            return next((tokens[write.token] for write in writes if write.token in tokens), None)

        return self.plane.wait(by_token, PATIENCE)

    def wait_until_held(self) -> None:
        """By one of the two, as it writes a Lease, and until somebody works."""

        def is_held() -> bool:
            self.start()
            return self.holder() is not None and self.lease()["spec"]["leaseDurationSeconds"] == 15

        self.plane.wait(is_held, PATIENCE)
        self.leader()

    def check_that_writes_take_turns(self) -> None:
        """All that one life of an operator wrote was answered before the next one's first write arrived."""
        ours = self.processes[0].user
        writes = [w for w in self.plane.written_since(self.mark, by=ours) if w.code]
        lives: dict[str, list[str]] = {}
        for write in writes:
            lives.setdefault(write.token, []).extend((write.received, write.answered))
        times = sorted((min(times), max(times)) for times in lives.values())
        assert all(first[1] <= second[0] for first, second in pairwise(times)), times


@pytest.fixture(scope="module")
def pair(
    plane: Cluster, chart: str, operator_process: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    operator_process.kill()
    flags = chart_flags(plane)
    # Given up by somebody before: the first one need not wait.
    released = {"metadata": {"name": LEASE}, "spec": {"leaseDurationSeconds": 1}}
    plane.api.create(LEASES, released, SYSTEM_NAMESPACE)
    processes = [Operator(plane, tmp_path_factory.mktemp("operator"), chart, *flags) for _ in range(2)]
    with new_namespace(plane, "turns") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        pair, is_over = Pair(plane, processes, namespace), threading.Event()
        changing = threading.Thread(target=_change, args=(plane, namespace, is_over))
        changing.start()
        try:
            yield pair
            assert [line for process in processes for line in process.refusals()] == []
        finally:
            is_over.set()
            changing.join()
            for process in processes:
                process.close()


def _change(plane: Cluster, namespace: str, is_over: threading.Event) -> None:
    """Scale the cluster again and again."""
    number = 0
    while not is_over.wait(0.1):
        number += 1
        with suppress(OSError, HTTPException, ApiError):  # a server that is killed in the middle of an answer
            plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"replicas": number % 3}}}, namespace)


@pytest.fixture(autouse=True)
def _take_turns(pair: Pair) -> Iterator[None]:
    pair.start()
    yield
    pair.check_that_writes_take_turns()


def measured(what: str, action: Callable[[], object]) -> None:
    begin = time.monotonic()
    action()
    print(f"{what}: {time.monotonic() - begin:.1f} s")


def test_one_writes_and_the_other_stands_by(pair):
    pair.leader()

    def is_told() -> bool:
        leader = pair.leader()
        return pair.holder() is leader and leader.metric("lmcache_operator_leading") == 1

    def known_to_who_never_led() -> list[float] | None:
        for process in pair.processes:
            metrics = ("lmcache_operator_leading", "lmcache_operator_clusters")
            known = [*map(process.metric, metrics), process.num_reconciliations()]
            if LEADING not in pair.log(process):
                return known
        return None

    pair.plane.wait(is_told, PATIENCE)
    # Nothing is watched or known there.
    assert pair.plane.wait(known_to_who_never_led, PATIENCE) == [0, 0, 0]


def test_who_is_asked_to_end_lets_the_other_in_at_once(pair):
    leader = pair.leader()
    assert leader.terminate(timeout=PATIENCE) in (0, LOST)
    # Given up, and not left to run out, unless the API server did not answer in time.
    assert pair.holder() is not leader or "the lease was not released" in pair.log(leader)
    measured("SIGTERM of the leader", lambda: pair.leader(but=leader))


def test_a_lease_that_was_deleted_or_emptied_is_mended(pair):
    path = pair.plane.api.path(LEASES, SYSTEM_NAMESPACE, LEASE)
    pair.wait_until_held()
    pair.plane.api.delete(LEASES, LEASE, SYSTEM_NAMESPACE)
    pair.wait_until_held()
    for broken in ({}, {"leaseDurationSeconds": 9999, "leaseTransitions": 2**31 - 1}):

        def write(broken: Object = broken) -> bool:
            with suppress(ApiError):  # the leader was faster
                pair.plane.api.request("PUT", path, pair.lease() | {"spec": broken})
                return True
            return False

        pair.plane.wait(write, PATIENCE)
        pair.wait_until_held()


def test_a_leader_that_was_frozen_writes_nothing_when_it_thaws(pair):
    leader = pair.leader()
    leader.freeze()
    try:
        measured("freezing of the leader", lambda: pair.leader(but=leader))
    finally:
        leader.thaw()
    assert leader.wait(PATIENCE) == LOST
    assert "the lease is held by" in pair.log(leader).splitlines()[-1]
    pair.leader(but=leader)


def test_the_other_takes_over_from_one_that_was_killed_though_the_lease_names_a_stranger(pair):
    leader = pair.leader()
    leader.kill()
    with suppress(ApiError):
        pair.plane.api.patch(LEASES, LEASE, {"spec": {"holderIdentity": "a stranger"}}, SYSTEM_NAMESPACE)
    measured("death of the leader", lambda: pair.leader(but=leader))


def test_one_writes_after_a_restart_of_the_api_server(pair):
    pair.leader()
    pair.plane.kill("kube-apiserver")
    pair.plane.restart("kube-apiserver")
    # kopf ends with 1 where it finds no API server for a minute.
    pair.plane.wait(lambda: pair.leader(statuses=(LOST, 1)) is pair.holder(), PATIENCE)
    for process in pair.processes:
        process.forgive()
