"""Two pods with exact tiers, polled every minute, and the decisions about their size."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lmcache_operator.autoscaling.intake.answers import figures as figures_of
from lmcache_operator.autoscaling.intake.lookups import NoAnswer, TimedAnswer
from lmcache_operator.autoscaling.sizing import POLL_SECONDS, Situation, Sizing, SizingSettings
from lmcache_operator.policy.report import Report
from lmcache_operator.policy.tier import Prices
from lmcache_store.curves import answers
from testing.workloads.closed_loop import sticky
from testing.workloads.requests import HOUR, Request, Workload, chat
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service

START = 1_800_000_000.0
SIZE = 64 << 30
AUTO = SizingSettings(SIZE, (16 << 30, 512 << 30), Prices(2.5, 0.004, 0.004), is_memory_auto=True)
PODS = {"uid-0": "pod-0", "uid-1": "pod-1"}
MAX_KEYS = 64_000


@cache
def talk(hours: int = 5) -> Workload:
    workload = chat(hours, 0.2, scale=4)
    moved = [Request(request.time + START, request.session, request.keys) for request in workload.requests]
    return Workload(moved, workload.scale)


@dataclass
class Loop:
    """Two pods, polled once a minute. A change of size takes effect with the next poll."""

    sizing: Sizing = field(default_factory=Sizing)
    settings: SizingSettings = AUTO
    workload: Workload = field(default_factory=talk)
    now: float = START
    report: Report | None = None

    def __post_init__(self) -> None:
        self.pods = Service(2, 0, self.workload.rows(SIZE))
        self.sidecars = Sidecars(self.workload, self.pods, 2, SIZE)
        self.requests = iter(self.workload.requests)
        self.following = next(self.requests)
        self.route = sticky(2)
        self.situation = Situation(self.settings, PODS)
        self.refusals: dict[str, NoAnswer] = {}
        self.reports: list[Report] = []

    def ask(self, pod: int) -> TimedAnswer | NoAnswer:
        uid = f"uid-{pod}"
        if uid in self.refusals:
            return self.refusals[uid]
        question = self.sizing.intake.question(uid)
        answer = json.loads(json.dumps(self.sidecars.samples(pod, self.now, **question)))
        return TimedAnswer(self.now, answers.samples(answer), figures_of(self.sidecars.stats(pod)))

    def poll(self) -> None:
        self.now += POLL_SECONDS
        while self.following.time <= self.now:
            self.sidecars.serve(self.route(self.following), self.following)
            self.following = next(self.requests)
        polled = {uid: self.ask(int(uid[-1])) for uid in self.situation.pods}
        for _ in self.sizing.intake.take(
            self.now, self.situation.pods, self.situation.bounds, polled, MAX_KEYS
        ):
            pass
        if self.sizing.is_due(self.now, self.situation):
            self.report = self.sizing.decide(self.now, self.situation)
            self.reports.append(self.report)

    def run(self, hours: float, *, follow: bool = True) -> None:
        end = self.now + hours * HOUR
        while self.now + POLL_SECONDS <= end:
            self.poll()
            if follow and self.report and self.report.memory:
                self.resize(self.report.memory.size)

    def resize(self, size: int) -> None:
        self.sidecars.size_bytes = size
        self.pods.resize(self.workload.rows(size))

    def memory_status(self) -> Mapping[str, Any]:
        assert self.report
        return self.report.status["memory"]
