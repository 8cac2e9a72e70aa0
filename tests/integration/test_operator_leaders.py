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

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster
from testing.kube.operator import SYSTEM_NAMESPACE
from tests.harness.kube import CLUSTERS, NAME, SERVICE_ACCOUNT, Operator, example, new_namespace

pytestmark = pytest.mark.kube

LEASES = "coordination.k8s.io/v1/leases"
LEASE = SERVICE_ACCOUNT
PATIENCE = 120.0
"""Seconds; the bar is 20 from a leader's death to the first write of the next, which are printed."""
LOST = 3
"""Exit status of an operator that another one has followed."""


class Pair:
    """Two operators, and how to look at them."""

    def __init__(self, plane: Cluster, processes: list[Operator], namespace: str) -> None:
        self.plane, self.processes, self.namespace = plane, processes, namespace
        self.mark = plane.mark()

    def start(self) -> None:
        """Those that are not running."""
        for process in self.processes:
            if not process.is_running:
                process.start()

    def lease(self) -> Object:
        found: Object = self.plane.api.get(LEASES, LEASE, SYSTEM_NAMESPACE)
        return found

    def leader(self) -> Operator:
        """Who has written last, since now."""
        mark = self.plane.mark()

        def by_token() -> Operator | None:
            tokens = {process.token: process for process in self.processes}
            writes = self.plane.written_since(mark, namespace=self.namespace)
            return next((tokens[write.token] for write in writes if write.token in tokens), None)

        return self.plane.wait(by_token, PATIENCE)

    def wait_for_writes_of(self, process: Operator) -> None:
        self.plane.wait(lambda: self.leader() is process or None, PATIENCE)

    def other(self, process: Operator) -> Operator:
        (other,) = (one for one in self.processes if one is not process)
        return other

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
    deployment = plane.api.get("apps/v1/deployments", SERVICE_ACCOUNT, SYSTEM_NAMESPACE)
    _, *flags = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
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
    leader = pair.leader()
    pair.wait_for_writes_of(leader)
    other = pair.other(leader)
    assert pair.lease()["spec"]["holderIdentity"].startswith(leader.log_path.parent.name + "_")
    assert [process.metric("lmcache_operator_leading") for process in (leader, other)] == [1, 0]
    # Nothing is watched or known there.
    assert other.metric("lmcache_operator_clusters") == 0
    assert other.num_reconciliations() == 0


def test_who_is_asked_to_end_lets_the_other_in_at_once(pair):
    leader = pair.leader()
    assert leader.terminate(timeout=PATIENCE) == 0
    measured("SIGTERM of the leader", lambda: pair.wait_for_writes_of(pair.other(leader)))


def test_a_lease_that_was_deleted_or_emptied_is_mended_by_who_leads(pair):
    leader, path = pair.leader(), pair.plane.api.path(LEASES, SYSTEM_NAMESPACE, LEASE)
    pair.plane.api.delete(LEASES, LEASE, SYSTEM_NAMESPACE)
    holder = pair.plane.wait(lambda: pair.lease()["spec"].get("holderIdentity"), PATIENCE)
    for broken in ({}, {"leaseDurationSeconds": 9999, "leaseTransitions": 2**31 - 1}):

        def write(broken: Object = broken) -> bool:
            with suppress(ApiError):  # the leader was faster
                pair.plane.api.request("PUT", path, pair.lease() | {"spec": broken})
                return True
            return False

        pair.plane.wait(write, PATIENCE)
        pair.plane.wait(lambda: pair.lease()["spec"].get("holderIdentity") == holder, PATIENCE)
    assert pair.lease()["spec"]["leaseDurationSeconds"] == 15
    pair.wait_for_writes_of(leader)


def test_a_leader_that_was_frozen_writes_nothing_when_it_thaws(pair):
    leader = pair.leader()
    leader.freeze()
    try:
        measured("freezing of the leader", lambda: pair.wait_for_writes_of(pair.other(leader)))
    finally:
        leader.thaw()
    assert leader.wait(PATIENCE) == LOST
    assert "the lease is held by" in leader.log.splitlines()[-1]
    pair.wait_for_writes_of(pair.other(leader))


def test_the_other_takes_over_from_one_that_was_killed_though_the_lease_names_a_stranger(pair):
    leader = pair.leader()
    leader.kill()
    with suppress(ApiError):
        pair.plane.api.patch(LEASES, LEASE, {"spec": {"holderIdentity": "a stranger"}}, SYSTEM_NAMESPACE)
    measured("death of the leader", lambda: pair.wait_for_writes_of(pair.other(leader)))


def test_one_writes_after_a_restart_of_the_api_server(pair):
    pair.leader()
    pair.plane.kill("kube-apiserver")
    pair.plane.restart("kube-apiserver")

    def is_led() -> bool:
        name = pair.leader().log_path.parent.name
        return str(pair.lease()["spec"].get("holderIdentity")).startswith(name + "_")

    pair.plane.wait(is_led, PATIENCE)
    for process in pair.processes:
        process.forgive()
