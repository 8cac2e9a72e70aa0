"""Measure the time without repairs after the leading operator ends.

Two operators run with the chart's flags and permissions on a real API server. The benchmark kills or
terminates the leader at a random time between two renewals of its Lease. It then changes a child of a
cluster, and measures the time until the second operator has repaired the child. Then it starts the first
operator again.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.operator import cluster, num_ready
from benchmarks.report import Figure, Report, at_most
from testing.kube.api import wait_for
from testing.kube.cluster import Cluster
from testing.kube.operator import (
    CLUSTERS,
    CRDS,
    Operator,
    chart_flags,
    install,
)

ROUNDS = 6
RENEWAL_SECONDS = 2.0
"""Time between two renewals of the Lease."""
LEADING = "lmcache_operator_leading"
CHILD = "v1/services", "one", "default"
LABEL = "app.kubernetes.io/name"


def run() -> Report:
    with Cluster(crds=CRDS, num_nodes=1) as plane, two_operators(plane) as operators:
        plane.api.create(CLUSTERS, cluster("one"), "default")
        wait_for(lambda: num_ready(plane) == 1)
        killed = [seconds_unrepaired(plane, operators, Operator.kill) for _ in range(ROUNDS)]
        asked = [seconds_unrepaired(plane, operators, Operator.terminate) for _ in range(ROUNDS)]
    figures = [*of("SIGKILL", killed, 20), *of("SIGTERM", asked, 5)]
    return Report("failover", f"two operators, {ROUNDS} rounds each, a Lease of 15 s", figures)


@contextlib.contextmanager
def two_operators(plane: Cluster) -> Iterator[list[Operator]]:
    """Start two operators. Neither leads yet."""
    account = install(plane)
    flags = chart_flags(plane)
    with contextlib.ExitStack() as stack:
        directories = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        operators = [stack.enter_context(Operator(plane, path, account, *flags)) for path in directories]
        for operator in operators:
            operator.start()
        yield operators


def seconds_unrepaired(plane: Cluster, operators: list[Operator], end: Callable[[Operator], object]) -> float:
    """Return the seconds from the ``end`` of the leader to a repair by the other operator."""
    leader = wait_for(
        lambda: next(
            (operator for operator in operators if operator.metric("lmcache_operator_leading")), None
        )
    )
    wait_for(lambda: label(plane) == "lmcache-cluster")
    time.sleep(random.uniform(0, RENEWAL_SECONDS))  # a random time between two renewals
    start = time.monotonic()
    end(leader)
    kind, name, namespace = CHILD
    plane.api.patch(kind, name, {"metadata": {"labels": {LABEL: "other"}}}, namespace)
    wait_for(lambda: label(plane) == "lmcache-cluster", interval=0.05)
    seconds = time.monotonic() - start
    leader.start()
    return seconds


def label(plane: Cluster) -> str:
    """Return the label that the benchmark changes."""
    return str(plane.api.get(*CHILD)["metadata"]["labels"][LABEL])


def of(signal: str, seconds: list[float], limit: float) -> list[Figure]:
    return [
        Figure(f"{signal} of the leader until the other repairs, median", statistics.median(seconds), "s"),
        at_most("the same, slowest", max(seconds), "s", limit),
    ]
