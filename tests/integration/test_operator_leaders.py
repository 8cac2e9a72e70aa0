"""Two operators on a real API server: one leads after restarts, freezes, kills and edits of the Lease.

A thread changes the cluster all the time, so that the leader always has something to write.
"""

import threading
from collections.abc import Iterator
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
"""Seconds to wait for a new leader."""
LOST = 3
"""Exit status of an operator that lost the Lease to the other.

An operator may lose the Lease whenever the machine stalls for longer than the Lease lasts. No test may
therefore rely on the previous leader.
"""
LEADING = "leading as"


class Pair:
    """Two operators. ``start`` restarts an operator that has ended, as its pod would."""

    def __init__(self, plane: Cluster, processes: list[Operator], namespace: str) -> None:
        self.plane, self.processes, self.namespace = plane, processes, namespace
        self.mark = plane.mark()
        self._log_starts: dict[Operator, int] = {}

    def start(self, but: Operator | None = None, *, statuses: tuple[int, ...] = (LOST,)) -> None:
        """Start the operators that do not run. They may have ended with one of ``statuses``."""
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
        """The log of its latest run."""
        return process.log[self._log_starts[process] :]

    def lease(self) -> Object:
        lease: Object = self.plane.api.get(LEASES, LEASE, SYSTEM_NAMESPACE)
        return lease

    def holder(self) -> Operator | None:
        """The operator whose name is in the Lease."""
        identity = str(self.lease()["spec"].get("holderIdentity"))
        return next((p for p in self.processes if identity.startswith(f"{p.log_path.parent.name}_")), None)

    def leader(self, but: Operator | None = None, *, statuses: tuple[int, ...] = (LOST,)) -> Operator:
        """The first operator that writes from now on. ``but`` is neither started nor returned."""
        mark = self.plane.mark()

        def by_token() -> Operator | None:
            self.start(but, statuses=statuses)
            tokens = {process.token: process for process in self.processes if process is not but}
            writes = self.plane.written_since(mark, namespace=self.namespace)
            return next((tokens[write.token] for write in writes if write.token in tokens), None)

        return self.plane.wait(by_token, PATIENCE)

    def check_writes_do_not_overlap(self) -> None:
        """Check that all writes of one run were answered before the first write of the next run arrived."""
        user = self.processes[0].user
        writes = [w for w in self.plane.written_since(self.mark, by=user) if w.code]
        runs: dict[str, list[str]] = {}
        for write in writes:
            runs.setdefault(write.token, []).extend((write.received, write.answered))
        times = sorted((min(times), max(times)) for times in runs.values())
        assert all(first[1] <= second[0] for first, second in pairwise(times)), times


@pytest.fixture(scope="module")
def pair(
    plane: Cluster, chart: str, operator_process: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    operator_process.kill()
    flags = chart_flags(plane)
    # A released Lease: the first operator need not wait for its expiry.
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
    """Scale the cluster repeatedly."""
    number = 0
    while not is_over.wait(0.1):
        number += 1
        with suppress(OSError, HTTPException, ApiError):  # the server may be killed during an answer
            plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"replicas": number % 3}}}, namespace)


@pytest.fixture(autouse=True)
def _take_turns(pair: Pair) -> Iterator[None]:
    pair.start()
    yield
    pair.check_writes_do_not_overlap()


def test_leader_writes_while_the_other_operator_stands_by(pair):
    pair.leader()

    def is_reported() -> bool:
        leader = pair.leader()
        return pair.holder() is leader and leader.metric("lmcache_operator_leading") == 1

    def metrics_of_standby() -> list[float] | None:
        for process in pair.processes:
            metrics = ("lmcache_operator_leading", "lmcache_operator_clusters")
            values = [*map(process.metric, metrics), process.num_reconciliations()]
            if LEADING not in pair.log(process):
                return values
        return None

    pair.plane.wait(is_reported, PATIENCE)
    # The standby watches nothing and knows no cluster.
    assert pair.plane.wait(metrics_of_standby, PATIENCE) == [0, 0, 0]


def test_terminated_leader_releases_the_lease(pair):
    leader = pair.leader()
    assert leader.terminate(timeout=PATIENCE) in (0, LOST)
    # The leader released the Lease, unless the API server did not answer in time.
    assert pair.holder() is not leader or "could not release the lease" in pair.log(leader)
    pair.leader(but=leader)


@pytest.mark.rotating
def test_frozen_leader_writes_nothing_after_it_thaws(pair):
    leader = pair.leader()
    leader.freeze()
    try:
        pair.leader(but=leader)
    finally:
        leader.thaw()
    assert leader.wait(PATIENCE) == LOST
    assert "the lease is held by" in pair.log(leader).splitlines()[-1]
    pair.leader(but=leader)


def test_one_operator_leads_after_a_restart_of_the_api_server(pair):
    pair.leader()
    pair.plane.kill("kube-apiserver")
    pair.plane.restart("kube-apiserver")
    # kopf ends with status 1 if it finds no API server for a minute.
    pair.plane.wait(lambda: pair.leader(statuses=(LOST, 1)) is pair.holder(), PATIENCE)
    for process in pair.processes:
        process.forgive()
