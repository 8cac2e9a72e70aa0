"""What pods say, counted once."""

from __future__ import annotations

from array import array

import pytest
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


class Said:
    """What two pods say, minute after minute."""

    def __init__(self) -> None:
        self.intake, self.now = Intake({}), START
        self.pods = {uid: {"rows": 0, "written": 0, "stored": 0, "touched": 0, "promoted": 0} for uid in "ab"}
        self.namespaces = dict.fromkeys("ab", "5f" * 32)
        self.row_bytes = dict.fromkeys("ab", 1 << 20)
        self.loading = 3e9

    def poll(self) -> None:
        self.now += 60.0
        said = {}
        for uid, counts in self.pods.items():
            rows, remote = counts["rows"], {name: counts[name] for name in answers.Counts._fields[5:]}
            lookups = {"lookup_tokens": 100 * rows, "hit_tokens": {"memory": 40 * rows, "remote": 30 * rows}}
            measured = dict.fromkeys(
                ("gpus", "prefill_tokens_per_second", "kv_bytes_per_token", "engine_kv_bytes"), 1
            )
            told = {"memory": {"size_bytes": 1 << 30}, "lookups": lookups | measured}
            told["remote"] = remote | {"load_bytes_per_second": self.loading}
            samples = answers.Samples(
                self.now,
                START,
                self.namespaces[uid],
                1.0,
                rows,
                0,
                self.row_bytes[uid],
                100,
                *(array(code) for code in "dlQ"),
            )
            said[uid] = Answer(self.now, samples, answers.figures(told))
        for _ in self.intake.take(self.now, list(said), (1.0, 2.0**40), said, 1000):
            pass


def test_what_shards_had_already_was_not_moved_to_them():
    """Each of two columns of 100 rows; three of four were there, written by other pods."""
    said = Said()
    said.poll()
    said.pods["a"] |= {"rows": 1, "written": 100, "stored": 50, "touched": 150, "promoted": 10}
    said.poll()
    assert said.intake.moved.accesses_per_hour == pytest.approx(60 * (25 + 10) * 2**20)


def test_pods_of_another_namespace_are_not_counted():
    said = Said()
    said.namespaces["c"] = said.namespaces["a"]
    said.row_bytes["c"], said.pods["c"] = 1 << 20, dict(said.pods["a"])
    said.namespaces["b"], said.row_bytes["b"] = "77" * 32, 5
    said.poll()
    said.pods["a"]["rows"] = said.pods["b"]["rows"] = 6
    said.poll()
    assert said.intake.row_bytes == 1 << 20
    assert said.intake.traffic.curve.windows[0].accesses_per_hour == pytest.approx(60 * 6)
    assert said.intake.lower.measured_hits == pytest.approx(0.3)
    assert said.intake.traffic.num_pods == pytest.approx(3), "all have memory"


def test_hours_without_pods_are_not_paid_for():
    """A cluster that was scaled to zero over a weekend has lost accesses and costs alike."""
    said = Said()
    for _ in range(24 * 60):
        for counts in said.pods.values():
            counts["rows"] += 10
        said.poll()
    pods, said.pods = said.pods, {}
    for _ in range(60 * 60):
        said.poll()
    said.pods = pods
    for _ in range(10):
        for counts in said.pods.values():
            counts["rows"] += 10
        said.poll()
    traffic = said.intake.traffic
    rate = traffic.curve.windows[0].accesses_per_hour / traffic.num_pods
    assert rate == pytest.approx(600, rel=0.05)


def test_how_fast_a_tier_loads_is_known_while_nothing_is_loaded():
    said = Said()
    said.poll()
    said.loading = 0
    said.poll()
    assert said.intake.pods["a"].figures.remote_bytes_per_second == 3e9


TestIntakeModel = IntakeModel.TestCase
TestIntakeModel.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)
