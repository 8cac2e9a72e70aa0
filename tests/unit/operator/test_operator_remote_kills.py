"""Shards outlive an operator that is killed after any write, and two that work at once."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_operator.components.base import Observed, Plan
from lmcache_operator.components.pods import is_outdated, is_ready, started_at
from lmcache_operator.components.remote.pod import speaks_tls
from lmcache_operator.components.remote.shards import WINDOW, Shards
from lmcache_operator.specs.names import annotations_of

from lmcache.units import parse_quantity
from tests.harness.operator_model import Object
from tests.harness.operator_plans import carry_out
from tests.harness.operator_shards import CERTIFICATE, ENGINE, LIST, SET, Rig, secure

TLS: dict[str, Any] = {
    "none": None,
    "issuer": {"issuerRef": {"name": "caches"}, "secretRef": None},
    "secret": {"secretRef": {"name": "demo-remote-tls"}, "issuerRef": None},
    "renamed": {"secretRef": {"name": "ours"}, "issuerRef": None},
}


@functools.cache
def noted(tls: str) -> Object:
    """What is noted on the StatefulSet of the engines."""
    rig = Rig(tls=TLS[tls])
    rig.settle()
    return dict(annotations_of(rig.world.objects[ENGINE]))


class TimedRig(Rig):
    """Of its pods is known since when they are ready."""

    def run(self, *, is_ready: bool = True, most: int = 99) -> list[str]:
        written = super().run(is_ready=is_ready, most=most)
        self.note_times()
        return written

    def set_ready(self, name: str, is_ready: bool) -> None:
        self.world.set_ready(name, is_ready)
        self.note_times()

    def note_times(self) -> None:
        for pod in self.world.pods.values():
            pod["metadata"].setdefault("creationTimestamp", self.now.isoformat())
            pod["status"]["conditions"][0].setdefault("lastTransitionTime", self.now.isoformat())

    @property
    def servers(self) -> dict[str, Object]:
        """Their pods, by name."""
        return {name: pod for name, pod in self.world.pods.items() if name.startswith("demo-remote-")}


class KillMachine(RuleBasedStateMachine):
    """The operator is killed after any write. What is read is there, no two servers that serve are emptied
    within a window, and in the end all is as declared."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = TimedRig()
        self.rig.settle()
        self.rig.now += WINDOW
        self.declared: dict[str, Any] = {"shards": 2, "memoryPerShard": "1Gi", "tls": None}
        self.replaced: dict[str, datetime] = {}
        """Servers that served when they were, and when that was last."""

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
    def change_a_pod(self, number: int, wanted: bool) -> None:
        pod = self.rig.servers.get(f"demo-remote-{number}")
        if pod and is_ready(pod) != wanted:
            self.rig.set_ready(f"demo-remote-{number}", wanted)

    @rule(most=st.integers(0, 3), come=st.booleans())
    def run_and_be_killed(self, most: int, come: bool) -> None:
        listed = {f"demo-remote-{number}" for number in range(max(self.rig.list))}
        serving = {name for name, pod in self.rig.servers.items() if is_ready(pod)} & listed
        written = self.rig.run(is_ready=come, most=most)
        for name in serving:
            if f"evict {name}" in written:
                others = {other: time for other, time in self.replaced.items() if other != name}
                assert all(self.rig.now - time >= WINDOW for time in others.values()), others
                self.replaced[name] = self.rig.now

    @invariant()
    def what_is_read_is_there(self) -> None:
        live = self.the_list_is_whole()
        is_read = live.previous and self.rig.now < live.until
        assert max(live.current, live.previous if is_read else 0) <= self.rig.num_servers

    def the_list_is_whole(self) -> Shards:
        live = Shards.parse(annotations_of(self.rig.world.objects[LIST])["lmcache.io/shards"])
        assert live is not None
        assert self.rig.list == (live.current, live.previous)
        # A certificate of another name has to be mounted; of nothing else engines notice anything.
        assert annotations_of(self.rig.world.objects[ENGINE]) in [noted(tls) for tls in TLS]
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


def test_a_server_that_was_not_ready_for_a_moment_is_not_the_emptiest():
    rig = TimedRig()
    rig.settle()
    rig.now += WINDOW
    rig.declare(2, memoryPerShard="2Gi")
    while "evict demo-remote-0" not in rig.run():
        pass
    rig.run()
    for is_ready_now in (False, True):  # the other one, after the replaced one became ready
        rig.now += timedelta(seconds=1)
        rig.set_ready("demo-remote-1", is_ready_now)
    rig.declare(2, memoryPerShard="4Gi")
    written = [line for _ in range(3) for line in rig.run() if line.startswith("evict")]
    assert written[0] == "evict demo-remote-0"


def test_a_server_is_as_old_as_its_containers_last_start():
    def pod(made: int, started: int | None = None) -> Object:
        running = {"running": {"startedAt": time_at(started)}} if started else {"waiting": {}}
        status = {"containerStatuses": [{"state": running}]}
        return {"metadata": {"creationTimestamp": time_at(made)}, "status": status}

    def time_at(minute: int) -> str:
        return f"2026-01-31T12:{minute:02}:00Z"

    observed = Observed(resource={}, now=datetime(2026, 2, 1, tzinfo=UTC))
    for made, started, last in ((5, None, 5), (5, 6, 6), (5, 40, 40)):
        assert started_at(pod(made, started), observed) == datetime.fromisoformat(time_at(last))


class TwoOperatorsMachine(KillMachine):
    """Two work by mistake: one writes what it wanted long ago. It may cost hits; nothing is lost for good."""

    def __init__(self) -> None:
        super().__init__()
        self.due = Plan()

    @rule()
    def the_other_looks(self) -> None:
        self.rig.run(most=0)
        self.due = replace(self.rig.plans["remote"], delete=(), evict=())

    @rule(most=st.integers(0, 3))
    def the_other_writes(self, most: int) -> None:
        carry_out(self.rig.world, replace(self.due, apply=self.due.apply[:most]))

    @invariant()
    def what_is_read_is_there(self) -> None:
        self.the_list_is_whole()


TestTwoOperators = TwoOperatorsMachine.TestCase
TestTwoOperators.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestKills = KillMachine.TestCase
TestKills.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
