"""Measure a real operator that sizes the tiers of real sidecars, while a trace is replayed at high speed.

API server, controllers, scheduler and operator are real. Only the clock of the operator's autoscaler is
faster. Each pod's sidecar is a process, and each shard is a redis-server with the rendered configuration of
its pod. kwok reports pods as running and grants their resizes. There are no engines: the replay looks up,
waits for promotions, leases and stores as an engine does, but it copies no KV. Memory is hundreds of times
smaller than the size that the operator sees.

Environment variables:

- TIER=memory (default): size each pod's memory. The runs start with a quarter of the best size, and with four
  times the best size. The exact curve of all lookups gives the best size.
- TIER=remote: choose the number of shards. The runs start with the smallest and the largest number. A
  simulation with exact tiers gives the best number.
- HOURS: hours of the trace. FACTOR: speed of the replay. OPERATOR_LOG: file for the operator's log.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.replayed import NUM_PODS, MemorySize, ShardCount, SizedTier
from benchmarks.report import Figure, Report, at_least, at_most
from testing.kube import operator as kube
from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.kube.fast_operator import MARK
from testing.kube.pod_processes import PodProcesses
from testing.kube.shards import PodShards
from testing.kube.sidecars import PodSidecars
from testing.processes import SidecarProcess
from testing.workloads.clock import Clock
from testing.workloads.replay import Replay, Served
from testing.workloads.requests import HOUR

TIERS: dict[str, type[SizedTier]] = {"memory": MemorySize, "remote": ShardCount}
TIER = TIERS[os.environ.get("TIER", "memory")]
HOURS = int(os.environ.get("HOURS", "14" if TIER is MemorySize else "12"))
FACTOR = float(os.environ.get("FACTOR", "75" if TIER is MemorySize else "60"))
FILL_HOURS = 0.5
"""Hours between a change and the first comparison of predicted and measured hits."""
NUM_NODES = 4
"""Simulated nodes of 1 TiB of memory."""


@dataclass
class Cloud:
    """One LMCacheCluster, with the events of its run."""

    name: str
    tier: SizedTier
    start: float
    ordered_sizes: Callable[[], list[tuple[float, float]]]
    """Returns (seconds since 1970, size) of all sizes that the operator ordered, in order."""
    pods: tuple[PodProcesses[Any], ...]
    replay: Replay
    sidecars: dict[str, SidecarProcess]
    """Sidecars by pod."""
    decisions: list[dict[str, Any]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of the sidecars at the end."""

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Return (hour, size) from the beginning to the end."""
        begin = [
            (0.0, self.start),
            *((self.replay.hour_of(seconds), size) for seconds, size in self.ordered_sizes()),
        ]
        return [*begin, (float(HOURS), begin[-1][1])]

    @property
    def changes(self) -> list[tuple[float, float]]:
        """Return (hour, size) of each change."""
        return [after for before, after in itertools.pairwise(self.sizes) if after[1] != before[1]]

    @property
    def final(self) -> float:
        return self.sizes[-1][1]

    @property
    def settled(self) -> float:
        """Return the hour of the first comparison of predicted and measured hits."""
        return FILL_HOURS + (self.changes[-1][0] if self.changes else 0.0)

    def hits(self, served: list[Served], begin: float, end: float) -> float:
        """Return the hits in these hours, in per cent of the rows that were looked up."""
        requests = [request for request in served if begin <= request.hour < end]
        num_rows = sum(request.num_rows for request in requests)
        return 100 * sum(map(self.tier.hits, requests)) / num_rows if num_rows else 0.0

    def realised(self) -> list[tuple[float, float]]:
        """Return (hour, measured hits in per cent) for each hour."""
        return [(hour + 0.5, self.hits(self.replay.served, hour, hour + 1)) for hour in range(HOURS)]

    def predicted_before(self) -> float:
        """Return the prediction for the final size, in per cent, at the time of its choice."""
        chosen: list[float] = [
            decision["hits_next"] for decision in self.decisions if decision["next"] != decision["size"]
        ]
        return 100 * (chosen[-1] if chosen else self.decisions[-1]["hits"])


def run() -> Report:
    tier = TIER(HOURS)
    clouds = replayed(tier)
    figures = [figure for cloud, _ in clouds for figure in figures_of(cloud)]
    num_requests, minutes = len(tier.workload.requests), HOURS * 60 / FACTOR
    conditions = (
        f"{tier.name} tier: {num_requests} requests of {HOURS} h in {minutes:.0f} min, {NUM_PODS} pods, "
        f"best {tier.described(tier.best)}"
    )
    series: dict[str, object] = {
        cloud.name: {
            "sizes": cloud.sizes, "realised": cloud.realised(), "decisions": cloud.decisions,
            "changes": cloud.changes, "stats": cloud.stats,
            "status": resource.get("status", {}).get("autoscaling"),
        }
        for cloud, resource in clouds
    }  # fmt: skip
    return Report("autoscale", conditions, figures, series)


def replayed(tier: SizedTier) -> list[tuple[Cloud, Object]]:
    """Run all clusters. Returns each with its final LMCacheCluster object."""
    clock = Clock(time.time(), FACTOR)
    program = ("-m", "testing.kube.fast_operator", f"{clock.origin}", f"{clock.factor}", f"{tier.scale}")
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(Cluster(crds=kube.CRDS, num_nodes=NUM_NODES))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        operator = kube.Operator(plane, directory, kube.install(plane), program=program)
        stack.enter_context(operator)
        operator.start()
        pid = os.getpid()
        addresses = (f"127.{64 + pid % 60}.{pid // 60 % 250}.{number}" for number in range(1, 250))
        clouds = [stack.enter_context(cloud(plane, tier, size, clock, addresses)) for size in tier.starts()]
        for each in clouds:
            each.replay.start([each.sidecars[pod] for pod in sorted(each.sidecars)])
        while sum(each.replay.is_over for each in clouds) < len(clouds):
            plane.check()
            operator.check()
            for each in clouds:
                for pods in each.pods:
                    pods.check()
            time.sleep(1)
        for each in clouds:
            each.stats += [sidecar.stats() for sidecar in each.sidecars.values()]
        results = [(each, plane.api.get(kube.CLUSTERS, each.name, "default")) for each in clouds]
        note_decisions(operator.log, clouds)
        if log_path := os.environ.get("OPERATOR_LOG"):
            Path(log_path).write_text(operator.log)
        return results


@contextlib.contextmanager
def cloud(
    plane: Cluster, tier: SizedTier, start: float, clock: Clock, addresses: Iterator[str]
) -> Iterator[Cloud]:
    """Create an LMCacheCluster whose pods have sidecars, and servers of its remote tier."""
    name = f"from-{tier.described(start)}".lower().replace(".", "-").replace(" ", "-")
    sidecars: dict[str, SidecarProcess] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shards = PodShards(plane.api, "default", name, addresses, folder, scale=tier.scale)
        pods = PodSidecars(
            plane.api, "default", name, addresses, sidecars.__setitem__, scale=tier.scale,
            options=shards.options if tier.name == "remote" else dict,
        )  # fmt: skip
        stack.enter_context(shards)
        stack.enter_context(pods)
        replay = Replay(tier.workload, tier.row_bytes, clock, name, tier.setup.route)
        stack.enter_context(replay)
        header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
        plane.api.create(
            kube.CLUSTERS, {**header, "metadata": {"name": name}, "spec": tier.spec(start)}, "default"
        )
        plane.wait(lambda: pods.num_running == NUM_PODS)

        def ordered_sizes() -> list[tuple[float, float]]:
            if tier.name == "remote":
                return [(seconds, float(number)) for seconds, number in shards.numbers]
            return [(seconds, float(size)) for seconds, size in next(iter(pods.sizes.values())) if size]

        yield Cloud(name, tier, start, ordered_sizes, (pods, shards), replay, sidecars)


def note_decisions(log: str, clouds: list[Cloud]) -> None:
    owners = {each.replay.namespace.hex(): each for each in clouds}
    for line in log.splitlines():
        if line.startswith(MARK):
            decision = json.loads(line.removeprefix(MARK))
            owner = owners.get(decision["namespace"])
            if owner and decision["tier"] == owner.tier.name:
                decision["hour"] = (decision["time"] - owner.replay.begin) / HOUR
                owner.decisions.append(decision)


def figures_of(cloud: Cloud) -> Iterator[Figure]:
    tier, name = cloud.tier, f"from {cloud.tier.described(cloud.start)}"
    best = tier.best
    yield Figure(f"{name}: at the end, {tier.described(cloud.final)}", cloud.final / best, "of the best size")
    share = 100 * tier.net(cloud.final) / tier.net(best)
    yield at_least(f"{name}: net value at the end, of the best fixed size", share, "%", 95)
    yield at_most(f"{name}: changes", len(cloud.changes), "", 6)
    yield Figure(f"{name}: settled from hour", cloud.settled, "h")
    realised = cloud.hits(cloud.replay.served, cloud.settled, HOURS)
    yield Figure(f"{name}: hits from then on", realised, "%")
    settled = [
        decision
        for decision in cloud.decisions
        if decision["hour"] > cloud.settled and decision["num_settled"] > 5000
    ]
    surprises = [100 * abs(decision["settled"] - decision["settled_measured"]) for decision in settled]
    surprise = statistics.mean(surprises or [math.nan])
    yield at_most(f"{name}: curve to measured, same requests", surprise, "points", 2)
    predicted, exact = cloud.predicted_before(), tier.served(cloud.final)
    # Without a change, the prediction is the last one, from all lookups.
    chosen = cloud.settled - FILL_HOURS if cloud.changes else HOURS
    drift = cloud.hits(exact, cloud.settled, HOURS) - cloud.hits(exact, 0, chosen)
    surplus = realised - predicted
    yield at_most(f"{name}: hits, off what was predicted when it was chosen", abs(surplus), "points", 2)
    yield Figure("    more than predicted", surplus, "points")
    yield Figure("    an exact tier of that size: more than until then", drift, "points")
    yield at_most("    the difference", abs(surplus - drift), "points", 2)
    yield at_most(f"{name}: longest delay of a request", cloud.replay.longest_lag, "s of the trace", 900)
