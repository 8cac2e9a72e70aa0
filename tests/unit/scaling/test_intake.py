"""What pods say, counted once."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmcache_operator.scaling import answers
from lmcache_operator.scaling.intake import Answer, Intake, NoAnswer

from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service

START = 1_800_000_000.0


class IntakeModel(RuleBasedStateMachine):
    """Pods serve, answer or not, lie, begin anew, and their clocks are set; no sample counts twice, and none
    is left out of pods that were asked before and did nothing of that."""

    def __init__(self) -> None:
        super().__init__()
        self.intake, self.now, self.count = Intake({}), START, 0
        self.sidecars = Sidecars(Workload([]), Service(3, 0, 4), 3, 1 << 30)
        self.is_clean = True
        self.served = self.settled = 0

    @rule(
        pod=st.integers(0, 2), keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4, unique=True)
    )
    def serve(self, pod, keys):
        self.now += 0.5
        self.sidecars.serve(pod, Request(self.now, 0, tuple(keys)))
        self.served += len(keys)

    @rule(answering=st.sets(st.integers(0, 2)), refusing=st.sets(st.integers(0, 2)))
    def poll(self, answering, refusing):
        self.now += 10.0
        said = {}
        for pod in sorted(answering):
            uid = f"{pod}"
            told = self.sidecars.samples(pod, self.now, **self.intake.question(uid))
            try:
                found = answers.samples(told if pod not in refusing else None)
                said[uid] = Answer(self.now, found, answers.figures(self.sidecars.stats(pod)))
            except answers.RefusedAnswerError as error:  # also where its clock was set back meanwhile
                said[uid], self.is_clean = NoAnswer(str(error), answers.next_request(told)), False
        for _ in self.intake.take(self.now, ["0", "1", "2"], (1.0, 2.0**40), said, 1000):
            pass

    @rule(pod=st.integers(0, 2))
    def restart(self, pod):
        self.now += 1.0
        self.sidecars.restart(pod, self.now)
        self.is_clean = False

    @rule(pod=st.integers(0, 2), offset=st.floats(-3600, 3600))
    def set_clock(self, pod, offset):
        self.sidecars.told[pod].clock_offset = offset
        self.is_clean = False

    @precondition(lambda self: self.is_clean)
    @rule()
    def all_is_counted(self):
        """After all were asked once, whatever is served then counts."""
        self.poll({0, 1, 2}, set())
        before, served = self.intake.num_samples, self.served
        for pod in range(3):
            self.serve(pod, [self.served, self.served + 1])
        self.poll({0, 1, 2}, set())
        assert self.intake.num_samples - before == self.served - served

    @invariant()
    def nothing_is_counted_twice(self):
        assert self.intake.num_samples <= self.served
        if self.intake.traffic:
            assert self.intake.traffic.curve.windows[0].num_accesses <= self.served + 1e-6


TestIntakeModel = IntakeModel.TestCase
TestIntakeModel.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)
