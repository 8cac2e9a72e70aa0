"""Model-based test of shards when the operator is killed after any write, and when two operators run."""

import functools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_operator.components.remote.pod import speaks_tls
from lmcache_operator.components.remote.shards import WINDOW, ShardCounts
from lmcache_operator.contract.base import Observed, Plan
from lmcache_operator.pods.pods import is_outdated, is_ready, started_at
from lmcache_operator.specs.names import annotations_of
from lmcache_store.common.units import parse_quantity
from tests.harness.operator.model import Object
from tests.harness.operator.plans import carry_out
from tests.harness.operator.shards import CERTIFICATE, ENGINE, LIST, SET, Rig, secure
from tests.harness.scope import examples

TLS: dict[str, Any] = {
    "none": None,
    "issuer": {"issuerRef": {"name": "caches"}, "secretRef": None},
    "secret": {"secretRef": {"name": "ours"}, "issuerRef": None},
    "renamed": {"secretRef": {"name": "ours"}, "issuerRef": None},
}


@functools.cache
def engine_annotations(tls: str) -> Object:
    """Annotations of the engines' StatefulSet."""
    rig = Rig.settled(tls=TLS[tls])
    return dict(annotations_of(rig.world.objects[ENGINE]))


class TimedRig(Rig):
    """A rig that sets creation and ready times of its pods."""

    def run(self, *, is_ready: bool = True, max_writes: int = 99) -> list[str]:
        written = super().run(is_ready=is_ready, max_writes=max_writes)
        self.set_times()
        return written

    def set_ready(self, name: str, is_ready: bool) -> None:
        self.world.set_ready(name, is_ready)
        self.set_times()

    def set_times(self) -> None:
        for pod in self.world.pods.values():
            pod["metadata"].setdefault("creationTimestamp", self.now.isoformat())
            pod["status"]["conditions"][0].setdefault("lastTransitionTime", self.now.isoformat())

    @property
    def servers(self) -> dict[str, Object]:
        """Pods of the shards by name."""
        return {name: pod for name, pod in self.world.pods.items() if name.startswith("demo-remote-")}


class KillMachine(RuleBasedStateMachine):
    """The operator is killed after any write.

    All listed servers exist, the operator replaces at most one serving server per window, and finally the
    cluster matches the spec.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rig = TimedRig()
        self.rig.settle()
        self.rig.now += WINDOW
        self.declared: dict[str, Any] = {"shards": 2, "memoryPerShard": "1Gi", "tls": None}
        self.replaced_at: dict[str, datetime] = {}
        """Servers that were replaced while they served, with the time of the last replacement."""

    @rule(number=st.integers(1, 4))
    def declare(self, number: int) -> None:
        self._declare(shards=number)

    @rule(memory=st.sampled_from(["1Gi", "2Gi", "4Gi"]))
    def declare_memory(self, memory: str) -> None:
        self._declare(memoryPerShard=memory)

    @rule(tls=st.sampled_from(sorted(TLS)))
    def declare_tls(self, tls: str) -> None:
        self._declare(tls=TLS[tls])

    def _declare(self, **changes: Any) -> None:
        self.declared |= changes
        self.rig.declare(**self.declared)

    @rule(seconds=st.integers(1, 1000))
    def wait(self, seconds: int) -> None:
        self.rig.now += timedelta(seconds=seconds)

    @rule(number=st.integers(0, 3), wanted=st.booleans())
    def change_readiness(self, number: int, wanted: bool) -> None:
        pod = self.rig.servers.get(f"demo-remote-{number}")
        if pod and is_ready(pod) != wanted:
            self.rig.set_ready(f"demo-remote-{number}", wanted)

    @rule(max_writes=st.integers(0, 3), can_become_ready=st.booleans())
    def run_and_be_killed(self, max_writes: int, can_become_ready: bool) -> None:
        listed = {f"demo-remote-{number}" for number in range(max(self.rig.list))}
        serving = {name for name, pod in self.rig.servers.items() if is_ready(pod)} & listed
        written = self.rig.run(is_ready=can_become_ready, max_writes=max_writes)
        for name in serving:
            if f"evict {name}" in written:
                other_times = {
                    other_name: time for other_name, time in self.replaced_at.items() if other_name != name
                }
                assert all(self.rig.now - time >= WINDOW for time in other_times.values()), other_times
                self.replaced_at[name] = self.rig.now

    @invariant()
    def check_listed_shards_exist(self) -> None:
        live = self.check_list()
        is_read = live.previous and self.rig.now < live.until
        assert max(live.current, live.previous if is_read else 0) <= self.rig.num_servers

    def check_list(self) -> ShardCounts:
        live = ShardCounts.parse(annotations_of(self.rig.world.objects[LIST])["lmcache.io/shards"])
        assert live is not None
        assert self.rig.list == (live.current, live.previous)
        # Engines remount a renamed certificate. No other change reaches them.
        assert annotations_of(self.rig.world.objects[ENGINE]) in [engine_annotations(tls) for tls in TLS]
        return live

    def teardown(self) -> None:
        rig, number, tls = self.rig, self.declared["shards"], self.declared["tls"]
        for _ in range(9):
            for name, pod in rig.world.pods.items():
                if not is_ready(pod):
                    rig.set_ready(name, True)
            rig.settle()
            rig.now += WINDOW
        assert (rig.num_servers, rig.list) == (number, (number, 0))
        template = rig.world.objects[SET]["spec"]["template"]
        (server,) = template["spec"]["containers"]
        limit = parse_quantity(server["resources"]["limits"]["memory"])
        assert limit == parse_quantity(self.declared["memoryPerShard"])
        assert [pod for pod in rig.servers.values() if is_outdated(pod, template)] == []
        assert [speaks_tls(pod) for pod in rig.servers.values()] == [tls is not None] * number
        assert secure(rig) == [str(n) for n in range(number) if tls]
        assert (CERTIFICATE in rig.world.objects) == (tls is TLS["issuer"])


def test_briefly_unready_shard_is_not_replaced_first():
    rig = TimedRig.settled()
    rig.now += WINDOW
    rig.declare(2, memoryPerShard="2Gi")
    while "evict demo-remote-0" not in rig.run():
        pass
    rig.run()
    for is_ready_now in (False, True):  # the second shard, after the replaced shard became ready
        rig.now += timedelta(seconds=1)
        rig.set_ready("demo-remote-1", is_ready_now)
    rig.declare(2, memoryPerShard="4Gi")
    written = [line for _ in range(3) for line in rig.run() if line.startswith("evict")]
    assert written[0] == "evict demo-remote-0"


def test_started_at_is_the_last_container_start():
    def pod(created: int, started: int | None = None) -> Object:
        running = {"running": {"startedAt": time_at(started)}} if started else {"waiting": {}}
        status = {"containerStatuses": [{"state": running}]}
        return {"metadata": {"creationTimestamp": time_at(created)}, "status": status}

    def time_at(minute: int) -> str:
        return f"2026-01-31T12:{minute:02}:00Z"

    observed = Observed(resource={}, now=datetime(2026, 2, 1, tzinfo=UTC))
    for created, started, expected in ((5, None, 5), (5, 6, 6), (5, 40, 40)):
        assert started_at(pod(created, started), observed) == datetime.fromisoformat(time_at(expected))


class TwoOperatorsMachine(KillMachine):
    """Two operators run by mistake, and the second applies an old plan.

    It may cost hits, but no permanent loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due = Plan()

    @rule()
    def second_operator_plans(self) -> None:
        self.rig.run(max_writes=0)
        self.due = replace(self.rig.plans["remote"], delete=(), evict=())

    @rule(max_writes=st.integers(0, 3))
    def second_operator_writes(self, max_writes: int) -> None:
        carry_out(self.rig.world, replace(self.due, apply=self.due.apply[:max_writes]))

    @invariant()
    def check_listed_shards_exist(self) -> None:
        self.check_list()


TestTwoOperators = TwoOperatorsMachine.TestCase
TestTwoOperators.settings = settings(max_examples=examples(20), stateful_step_count=20)
TestKills = KillMachine.TestCase
TestKills.settings = settings(max_examples=examples(30), stateful_step_count=20)
