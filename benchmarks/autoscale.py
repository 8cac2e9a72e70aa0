"""Tiers that a real operator sizes while real sidecars serve a trace, many times as fast as it was.

API server, controllers and scheduler are real, and so is the operator, but for the clock of its autoscaler.
Each pod's sidecar is a process, and each shard a redis-server with what is rendered for its pod; kwok says
that pods run and grants their resizes. There are no engines: who replays the trace looks up, waits for what
is brought, leases and stores as they do, and copies nothing. Memory is hundreds of times as small as the
operator is told.

TIER=memory (the default) sizes each pod's memory, and begins with a quarter and with four times the best size
there is, by the exact curve of all that was looked up. TIER=remote sizes the number of shards, and begins
with the least and the most; the best is that of exact tiers. HOURS, FACTOR (how much faster) and OPERATOR_LOG
(a file for it) are variables of the environment, too.
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

from lmcache_operator.curve import Curve
from lmcache_operator.pictures import Line, Mark, Panel, svg

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
"""After a change, until what was predicted is compared with what is hit."""
NUM_NODES = 4
"""Of 1 TiB, as they say."""


@dataclass
class Cloud:
    """One LMCacheCluster, and what happened to it."""

    name: str
    tier: SizedTier
    start: float
    told: Callable[[], list[tuple[float, float]]]
    """(seconds since 1970, size) of all sizes that the operator ordered, one after the other."""
    pods: tuple[PodProcesses[Any], ...]
    replay: Replay
    sidecars: dict[str, SidecarProcess]
    """By pod."""
    decisions: list[dict[str, Any]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    """What sidecars say of themselves in the end."""

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """(hour, size) from the begin to the end."""
        begin = [(0.0, self.start), *((self.replay.hour_of(at), size) for at, size in self.told())]
        return [*begin, (float(HOURS), begin[-1][1])]

    @property
    def changes(self) -> list[tuple[float, float]]:
        """(hour, size) of each."""
        return [after for before, after in itertools.pairwise(self.sizes) if after[1] != before[1]]

    @property
    def final(self) -> float:
        return self.sizes[-1][1]

    @property
    def settled(self) -> float:
        """The hour from which on what was predicted is compared with what is hit."""
        return FILL_HOURS + (self.changes[-1][0] if self.changes else 0.0)

    def hits(self, served: list[Served], begin: float, end: float) -> float:
        """Per cent of the rows that were looked up in these hours."""
        found = [one for one in served if begin <= one.hour < end]
        num_rows = sum(one.num_rows for one in found)
        return 100 * sum(map(self.tier.hits, found)) / num_rows if num_rows else 0.0

    def realised(self) -> list[tuple[float, float]]:
        """(hour, per cent) of each hour."""
        return [(hour + 0.5, self.hits(self.replay.served, hour, hour + 1)) for hour in range(HOURS)]

    def predicted(self) -> list[tuple[float, float]]:
        """(hour, per cent) of each decision, of the size at that time."""
        return [(one["hour"], 100 * one["hits"]) for one in self.decisions]

    def predicted_before(self) -> float:
        """Per cent that the size of now was to hit, when it was chosen."""
        chosen: list[float] = [one["hits_next"] for one in self.decisions if one["next"] != one["size"]]
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
    pictures = {cloud.name: picture(cloud) for cloud, _ in clouds}
    pictures |= {f"{cloud.name}-curve": Curve.of(found, tier.name).picture() for cloud, found in clouds}
    return Report("autoscale", conditions, figures, series, pictures)


def replayed(tier: SizedTier) -> list[tuple[Cloud, Object]]:
    """Run all; with what became of the LMCacheClusters."""
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
        for one in clouds:
            one.replay.start([one.sidecars[pod] for pod in sorted(one.sidecars)])
        while sum(one.replay.is_over for one in clouds) < len(clouds):
            plane.check()
            operator.check()
            for one in clouds:
                for pods in one.pods:
                    pods.check()
            time.sleep(1)
        for one in clouds:
            one.stats += [sidecar.stats() for sidecar in one.sidecars.values()]
        found = [(one, plane.api.get(kube.CLUSTERS, one.name, "default")) for one in clouds]
        note_decisions(operator.log, clouds)
        if kept := os.environ.get("OPERATOR_LOG"):
            Path(kept).write_text(operator.log)
        return found


@contextlib.contextmanager
def cloud(
    plane: Cluster, tier: SizedTier, start: float, clock: Clock, addresses: Iterator[str]
) -> Iterator[Cloud]:
    """An LMCacheCluster whose pods have sidecars, and servers of a remote tier if it has one."""
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

        def told() -> list[tuple[float, float]]:
            if tier.name == "remote":
                return [(at, float(number)) for at, number in shards.numbers]
            return [(at, float(size)) for at, size in next(iter(pods.sizes.values())) if size]

        yield Cloud(name, tier, start, told, (pods, shards), replay, sidecars)


def note_decisions(log: str, clouds: list[Cloud]) -> None:
    owners = {one.replay.namespace.hex(): one for one in clouds}
    for line in log.splitlines():
        if line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            owner = owners.get(told["namespace"])
            if owner and told["tier"] == owner.tier.name:
                told["hour"] = (told["time"] - owner.replay.begin) / HOUR
                owner.decisions.append(told)


def figures_of(cloud: Cloud) -> Iterator[Figure]:
    tier, name = cloud.tier, f"from {cloud.tier.described(cloud.start)}"
    best = tier.best
    yield Figure(f"{name}: at the end, {tier.described(cloud.final)}", cloud.final / best, "of the best size")
    share = 100 * tier.net(cloud.final) / tier.net(best)
    yield at_least(f"{name}: worth at the end, of the best fixed size", share, "%", 95)
    yield at_most(f"{name}: changes", len(cloud.changes), "", 6)
    yield Figure(f"{name}: settled from hour", cloud.settled, "h")
    realised = cloud.hits(cloud.replay.served, cloud.settled, HOURS)
    yield Figure(f"{name}: hits from then on", realised, "%")
    told = [one for one in cloud.decisions if one["hour"] > cloud.settled and one["num_settled"] > 5000]
    surprises = [100 * abs(one["settled"] - one["settled_measured"]) for one in told]
    surprise = statistics.mean(surprises or [math.nan])
    yield at_most(f"{name}: curve to measured, same requests", surprise, "points", 2)
    predicted, exact = cloud.predicted_before(), tier.served(cloud.final)
    # Without a change the prediction is that of the end, of all that was looked up.
    chosen = cloud.settled - FILL_HOURS if cloud.changes else HOURS
    drift = cloud.hits(exact, cloud.settled, HOURS) - cloud.hits(exact, 0, chosen)
    surplus = realised - predicted
    yield at_most(f"{name}: hits, off what was predicted when it was chosen", abs(surplus), "points", 2)
    yield Figure("    more than predicted", surplus, "points")
    yield Figure("    an exact tier of that size: more than until then", drift, "points")
    yield at_most("    the difference", abs(surplus - drift), "points", 2)
    yield at_most(f"{name}: longest delay of a request", cloud.replay.longest_lag, "s of the trace", 900)


def picture(cloud: Cloud) -> str:
    """Size, and hits as predicted and realised, over time."""
    tier, ticks = cloud.tier, [(float(hour), f"{hour} h") for hour in range(0, HOURS + 1, 2)]
    best = tier.best
    unit, name = (1.0, "shards") if tier.name == "remote" else (2.0**30, "GiB")
    marks = [Mark(hour, tier.described(size)) for hour, size in cloud.changes]
    ideal = [(0.0, best / unit), (float(HOURS), best / unit)]
    sizes = [
        Line(f"{tier.name} tier", [(hour, size / unit) for hour, size in cloud.sizes], is_stepped=True),
        Line(f"best fixed size: {tier.described(best)}", ideal),
    ]
    hits = [Line("hit", cloud.realised()), Line("predicted for this size", cloud.predicted())]
    panels = [Panel(name, sizes, ticks, marks), Panel("% of prompt tokens", hits, ticks, marks)]
    reason = cloud.decisions[-1]["reason"]
    return svg(panels, f"At the end: {reason}")
