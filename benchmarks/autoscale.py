"""Memory tiers that a real operator sizes while real sidecars serve a trace, many times as fast as it was.

API server, controllers and scheduler are real, and so is the operator, but for the clock of its autoscaler.
Each pod's sidecar is a process; kwok says that pods run and grants their resizes. There are no engines: who
replays the trace looks up, leases and stores as they do, and copies nothing.

The trace is an hour of conversations, repeated with a tenth of its sessions each time and keys of their own.
A row is 256 KiB and stands for one of 64 MiB, so memory costs 256 times as much. Two LMCacheClusters begin
with a quarter and with four times the best size there is, by the exact curve of all that was looked up.
HOURS, FACTOR (how much faster) and OPERATOR_LOG (a file for it) are variables of the environment.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_operator.autoscaling.tier import Prices
from lmcache_operator.curve import Curve
from lmcache_operator.pictures import Line, Mark, Panel, svg

from benchmarks.report import Figure, Report, at_least, at_most
from benchmarks.sizing import TRACES
from lmcache.units import format_size
from testing.kube import operator as kube
from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.kube.fast_operator import MARK
from testing.kube.sidecars import PodSidecars
from testing.processes import SidecarProcess
from testing.workloads.closed_loop import Setup
from testing.workloads.replay import Clock, Replay, Served
from testing.workloads.requests import HOUR, mooncake, repeated
from testing.workloads.tiers import Service

HOURS, SHARE = int(os.environ.get("HOURS", "14")), 0.1
FACTOR = float(os.environ.get("FACTOR", "75"))
NUM_PODS, ROW_BYTES, SMALLER = 2, 256 << 10, 256
SMALLEST, LARGEST = 64 << 20, 2 << 30
USD_PER_GIB_HOUR = 0.001
FILL_HOURS = 0.5
"""After a change, until what was predicted is compared with what is hit."""
MIB, GIB = 2**20, 2**30


@dataclass
class Cloud:
    """One LMCacheCluster, and what happened to it."""

    name: str
    start: int
    """Bytes."""
    pods: PodSidecars
    replay: Replay
    sidecars: dict[str, SidecarProcess]
    """By pod."""
    sizes: list[tuple[float, float]] = field(default_factory=list)
    """(hour, MiB) of a pod, as its sidecar says."""
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def look(self) -> None:
        self.pods.check()
        sizes = [sidecar.stats()["memory"]["size_bytes"] for sidecar in self.sidecars.values()]
        self.sizes.append((self.replay.hour, sum(sizes) / len(sizes) / MIB))

    @property
    def changes(self) -> list[tuple[float, int]]:
        """(hour, bytes) of each change that the operator ordered, as the first pod was told."""
        (first, *_) = self.pods.sizes.values()
        told = [(self.replay.hour_of(at), int(size)) for at, size in first if size]
        sizes = [(0.0, self.start), *told]
        return [after for before, after in itertools.pairwise(sizes) if after[1] != before[1]]

    @property
    def final(self) -> int:
        return self.changes[-1][1] if self.changes else self.start

    @property
    def settled(self) -> float:
        """The hour from which on what was predicted is compared with what is hit."""
        return FILL_HOURS + (self.changes[-1][0] if self.changes else 0.0)

    def realised(self) -> list[tuple[float, float]]:
        """(hour, per cent) of each hour."""
        return [(hour + 0.5, hits(self.replay.served, hour, hour + 1)) for hour in range(HOURS)]

    def predicted(self) -> list[tuple[float, float]]:
        """(hour, per cent) of each decision, of the size at that time."""
        return [(one["hour"], 100 * one["hits"]) for one in self.decisions]

    def predicted_before(self) -> float:
        """Per cent that the size of now was to hit, when it was chosen."""
        chosen: list[float] = [one["hits_next"] for one in self.decisions if one["next"] != one["size"]]
        return 100 * (chosen[-1] if chosen else self.decisions[-1]["hits"])


def hits(served: Iterable[Served], begin: float, end: float) -> float:
    """Per cent of the rows that were looked up in these hours."""
    found = [one for one in served if begin <= one.hour < end]
    num_rows = sum(one.num_rows for one in found)
    return 100 * sum(one.num_hits for one in found) / num_rows if num_rows else 0.0


class Best:
    """What any size that never changes would have been worth, in USD per hour."""

    def __init__(self) -> None:
        workload = repeated(mooncake(TRACES / "mooncake_conversation_trace.jsonl.gz"), HOURS, share=SHARE)
        bounds = SMALLEST / GIB * SMALLER, LARGEST / GIB * SMALLER
        self.setup = Setup(workload, NUM_PODS, bounds=bounds, prices=Prices(2.50, USD_PER_GIB_HOUR))
        self._cost = self.setup.constant()
        rows = sum(len(request.keys) for request in workload.requests) / workload.hours
        self._recomputed = rows * self.setup.usd_per_miss
        self.size = int(self.setup.best_constant()[0] / SMALLER * GIB)

    def net(self, size: int) -> float:
        """Of so many bytes."""
        return self._recomputed - self._cost(size / GIB * SMALLER)

    def served(self, size: int) -> list[Served]:
        """What exact tiers of so many bytes hit."""
        pods, route = Service(NUM_PODS, 0, size // ROW_BYTES), self.setup.route(NUM_PODS)
        return [
            Served(one.time / HOUR, len(one.keys), pods.serve(route(one), one.keys).memory)
            for one in self.setup.workload.requests
        ]


def run() -> Report:
    best = Best()
    rounded = round(best.size / MIB / 4) * MIB
    starts = [max(SMALLEST, rounded), min(LARGEST, 16 * rounded)]
    clouds = replayed(best, starts)
    figures = [figure for cloud, _ in clouds for figure in figures_of(cloud, best)]
    num_requests, minutes = len(best.setup.workload.requests), HOURS * 60 / FACTOR
    bounds = f"{format_size(SMALLEST)}-{format_size(LARGEST)}"
    conditions = (
        f"{num_requests} requests of {HOURS} h in {minutes:.0f} min, {NUM_PODS} pods, "
        f"{bounds} each, best {format_size(best.size)}"
    )
    series: dict[str, object] = {
        cloud.name: {
            "sizes": cloud.sizes, "realised": cloud.realised(), "decisions": cloud.decisions,
            "changes": cloud.changes, "status": resource.get("status", {}).get("autoscaling"),
        }
        for cloud, resource in clouds
    }  # fmt: skip
    pictures = {cloud.name: picture(cloud, best) for cloud, _ in clouds}
    pictures |= {f"{cloud.name}-curve": Curve.of(resource, "memory").picture() for cloud, resource in clouds}
    return Report("autoscale", conditions, figures, series, pictures)


def replayed(best: Best, starts: list[int]) -> list[tuple[Cloud, Object]]:
    """Run all; with what became of the LMCacheClusters."""
    clock = Clock(time.time(), FACTOR)
    program = ("-m", "testing.kube.fast_operator", f"{clock.origin}", f"{clock.factor}")
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(Cluster(crds=kube.CRDS, num_nodes=1))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        operator = kube.Operator(plane, directory, kube.install(plane), program=program)
        stack.enter_context(operator)
        operator.start()
        pid = os.getpid()
        addresses = (f"127.{64 + pid % 60}.{pid // 60 % 250}.{number}" for number in range(1, 250))
        clouds = [stack.enter_context(cloud(plane, best, size, clock, addresses)) for size in starts]
        for one in clouds:
            one.replay.start([one.sidecars[pod] for pod in sorted(one.sidecars)])
        while sum(one.replay.is_over for one in clouds) < len(clouds):
            plane.check()
            operator.check()
            for one in clouds:
                one.look()
            time.sleep(1)
        found = [(one, plane.api.get(kube.CLUSTERS, one.name, "default")) for one in clouds]
        note_decisions(operator.log, clouds)
        if kept := os.environ.get("OPERATOR_LOG"):
            Path(kept).write_text(operator.log)
        return found


@contextlib.contextmanager
def cloud(plane: Cluster, best: Best, start: int, clock: Clock, addresses: Iterator[str]) -> Iterator[Cloud]:
    """An LMCacheCluster whose pods have sidecars."""
    name = f"from-{format_size(start).lower()}".replace(".", "-")
    sidecars: dict[str, SidecarProcess] = {}
    with (
        PodSidecars(plane.api, "default", name, addresses, sidecars.__setitem__) as pods,
        Replay(best.setup.workload, ROW_BYTES, clock, name) as replay,
    ):
        plane.api.create(kube.CLUSTERS, declared(name, start), "default")
        plane.wait(lambda: pods.num_running == NUM_PODS)
        yield Cloud(name, start, pods, replay, sidecars)


def declared(name: str, start: int) -> Object:
    requests = {"requests": {"cpu": "10m", "memory": "1Mi"}}
    template = {"spec": {"containers": [{"name": "engine", "resources": requests}]}}
    prices = {"gpuHour": "2.50", "memoryGiBHour": f"{USD_PER_GIB_HOUR * SMALLER:.3f}"}
    bounds = {"minSize": str(SMALLEST), "maxSize": str(LARGEST)}
    spec = {
        "model": {"name": "org/model"},
        "engine": {"replicas": NUM_PODS, "gpu": {"count": 0}, "podTemplate": template},
        "tiers": {"memory": {"size": str(start)}},
        "autoscaling": {"mode": "Auto", "memory": bounds, "prices": prices},
    }
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    return {**header, "metadata": {"name": name}, "spec": spec}


def note_decisions(log: str, clouds: list[Cloud]) -> None:
    owners = {one.replay.namespace.hex(): one for one in clouds}
    for line in log.splitlines():
        if line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            if owner := owners.get(told["namespace"]):
                told["hour"] = (told["time"] - owner.replay.begin) / HOUR
                owner.decisions.append(told)


def figures_of(cloud: Cloud, best: Best) -> Iterator[Figure]:
    name = f"from {format_size(cloud.start)}"
    share = 100 * best.net(cloud.final) / best.net(best.size)
    yield Figure(f"{name}: size at the end", cloud.final / MIB, "MiB")
    yield at_least(f"{name}: worth at the end, of the best fixed size", share, "%", 95)
    yield at_most(f"{name}: changes", len(cloud.changes), "", 6)
    yield Figure(f"{name}: settled from hour", cloud.settled, "h")
    realised = hits(cloud.replay.served, cloud.settled, HOURS)
    yield Figure(f"{name}: hits from then on", realised, "%")
    told = [one for one in cloud.decisions if one["hour"] > cloud.settled and one["num_settled"] > 5000]
    surprises = [100 * abs(one["settled"] - one["settled_measured"]) for one in told]
    surprise = statistics.mean(surprises or [math.nan])
    yield at_most(f"{name}: curve to measured, same requests", surprise, "points", 2)
    predicted, exact = cloud.predicted_before(), best.served(cloud.final)
    # Without a change the prediction is that of the end, of all that was looked up.
    chosen = cloud.settled - FILL_HOURS if cloud.changes else HOURS
    drift = hits(exact, cloud.settled, HOURS) - hits(exact, 0, chosen)
    surplus = realised - predicted
    yield at_most(f"{name}: hits, off what was predicted when it was chosen", abs(surplus), "points", 2)
    yield Figure("    more than predicted", surplus, "points")
    yield Figure("    an exact tier of that size: more than until then", drift, "points")
    yield at_most("    the difference", abs(surplus - drift), "points", 2)
    yield at_most(f"{name}: longest delay of a request", cloud.replay.longest_lag, "s of the trace", 900)


def picture(cloud: Cloud, best: Best) -> str:
    """Size, and hits as predicted and realised, over time."""
    ticks = [(float(hour), f"{hour} h") for hour in range(0, HOURS + 1, 2)]
    ideal = best.size / MIB
    marks = [Mark(hour, format_size(size)) for hour, size in cloud.changes]
    sizes = [
        Line("size of a pod's memory tier", cloud.sizes, is_stepped=True),
        Line(f"best fixed size: {ideal:.0f} MiB", [(0.0, ideal), (float(HOURS), ideal)]),
    ]
    hits = [Line("hit", cloud.realised()), Line("predicted for this size", cloud.predicted())]
    panels = [Panel("MiB", sizes, ticks, marks), Panel("% of prompt tokens", hits, ticks, marks)]
    reason = cloud.decisions[-1]["reason"]
    return svg(panels, f"At the end: {reason}")
