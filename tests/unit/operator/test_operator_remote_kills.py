"""Shards outlive an operator that is killed after any write, and two that work at once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_operator.components.base import Plan
from lmcache_operator.components.remote.shards import WINDOW, Shards
from lmcache_operator.specs.names import annotations_of

from tests.harness.operator_plans import carry_out
from tests.harness.operator_shards import ENGINE, LIST, Rig


class KillMachine(RuleBasedStateMachine):
    """The operator is killed after any write. What is read is there, and in the end all is as declared."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.rig.settle()

    @rule(number=st.integers(1, 4))
    def declare(self, number: int) -> None:
        self.rig.declare(number)

    @rule(seconds=st.integers(1, 1000))
    def wait(self, seconds: int) -> None:
        self.rig.now += timedelta(seconds=seconds)

    @rule(number=st.integers(0, 3), is_ready=st.booleans())
    def change_a_pod(self, number: int, is_ready: bool) -> None:
        if f"demo-remote-{number}" in self.rig.world.pods:
            self.rig.world.set_ready(f"demo-remote-{number}", is_ready)

    @rule(most=st.integers(0, 3), is_ready=st.booleans())
    def run_and_be_killed(self, most: int, is_ready: bool) -> None:
        self.rig.run(is_ready=is_ready, most=most)

    @invariant()
    def what_is_read_is_there(self) -> None:
        live = Shards.parse(annotations_of(self.rig.world.objects[LIST])["lmcache.io/shards"])
        assert self.rig.list == (live.current, live.previous)
        is_read = live.previous and self.rig.now < live.until
        assert max(live.current, live.previous if is_read else 0) <= self.rig.num_servers
        assert annotations_of(self.rig.world.objects[ENGINE]) == self.engine

    @initialize()
    def begin(self) -> None:
        self.engine = annotations_of(self.rig.world.objects[ENGINE])

    def teardown(self) -> None:
        rig = self.rig
        for _ in range(4):
            for pod in rig.world.pods:
                rig.world.set_ready(pod, True)
            rig.settle()
            rig.now += WINDOW
        declared = rig.world.resource["spec"]["tiers"]["remote"]["managed"]["shards"]
        assert (rig.num_servers, rig.list) == (declared, (declared, 0))


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
        live = Shards.parse(annotations_of(self.rig.world.objects[LIST])["lmcache.io/shards"])
        assert self.rig.list == (live.current, live.previous)
        assert annotations_of(self.rig.world.objects[ENGINE]) == self.engine


TestTwoOperators = TwoOperatorsMachine.TestCase
TestTwoOperators.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestKills = KillMachine.TestCase
TestKills.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
