"""Intake of pods' samples: each sample is counted once."""

from array import array

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_operator.autoscaling.intake.answers import Counts
from lmcache_operator.autoscaling.intake.answers import figures as figures_of
from lmcache_operator.autoscaling.intake.lookups import Intake, NoAnswer, TimedAnswer
from lmcache_store.curves import answers
from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service
from tests.harness.scope import examples

START = 1_800_000_000.0


class IntakeModel(RuleBasedStateMachine):
    """Pods serve, fail to answer, return invalid answers, restart, and change their clocks.

    No sample counts twice. All samples of pods without such faults count.
    """

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
        answers_by_uid: dict[str, TimedAnswer | NoAnswer] = {}
        for pod in sorted(answering):
            uid = f"{pod}"
            raw_answer = self.sidecars.samples(pod, self.now, **self.intake.question(uid))
            try:
                parsed = answers.samples(raw_answer if pod not in refusing else None)
                answers_by_uid[uid] = TimedAnswer(self.now, parsed, figures_of(self.sidecars.stats(pod)))
            except answers.InvalidAnswerError as error:  # also if its clock was set back
                answers_by_uid[uid] = NoAnswer(str(error), answers.next_request(raw_answer))
                self.is_clean = False
        for _ in self.intake.take(self.now, ["0", "1", "2"], (1.0, 2.0**40), answers_by_uid, 1000):
            pass

    @rule(pod=st.integers(0, 2))
    def restart(self, pod):
        self.now += 1.0
        self.sidecars.restart(pod, self.now)
        self.is_clean = False

    @rule(pod=st.integers(0, 2), offset=st.floats(-3600, 3600))
    def set_clock(self, pod, offset):
        self.sidecars.samplers[pod].clock_offset = offset
        self.is_clean = False

    @precondition(lambda self: self.is_clean)
    @rule()
    def check_all_samples_are_counted(self):
        """After a poll of all pods, all new samples count."""
        self.poll({0, 1, 2}, set())
        before, served = self.intake.num_samples, self.served
        for pod in range(3):
            self.serve(pod, [self.served, self.served + 1])
        self.poll({0, 1, 2}, set())
        assert self.intake.num_samples - before == self.served - served

    @invariant()
    def check_no_sample_is_counted_twice(self):
        assert self.intake.num_samples <= self.served
        if self.intake.traffic:
            assert self.intake.traffic.curve.windows[0].num_accesses <= self.served + 1e-6


class PolledPods:
    """Two pods whose answers are counted every minute."""

    def __init__(self) -> None:
        self.intake, self.now = Intake({}), START
        self.pods = {uid: {"rows": 0, "written": 0, "stored": 0, "touched": 0, "promoted": 0} for uid in "ab"}
        self.namespaces = dict.fromkeys("ab", "5f" * 32)
        self.row_bytes = dict.fromkeys("ab", 1 << 20)
        self.load_bytes_per_second = 3e9

    def poll(self) -> None:
        self.now += 60.0
        answers_by_uid: dict[str, TimedAnswer | NoAnswer] = {}
        for uid, counts in self.pods.items():
            rows, remote = counts["rows"], {name: counts[name] for name in Counts._fields[6:]}
            lookups = {"lookup_tokens": 100 * rows, "hit_tokens": {"memory": 40 * rows, "remote": 30 * rows}}
            names = "gpus", "prefill_tokens_per_second", "kv_bytes_per_token", "engine_kv_bytes"
            raw_answer = {"memory": {"size_bytes": 1 << 30}, "lookups": lookups | dict.fromkeys(names, 1)}
            raw_answer["remote"] = remote | {"load_bytes_per_second": self.load_bytes_per_second}
            header = self.now, START, self.namespaces[uid], 1.0, rows, 0, self.row_bytes[uid], 100
            samples = answers.Samples(*header, *(array(code) for code in "dlQ"))
            answers_by_uid[uid] = TimedAnswer(self.now, samples, figures_of(raw_answer))
        for _ in self.intake.take(self.now, list(answers_by_uid), (1.0, 2.0**40), answers_by_uid, 1000):
            pass


def test_objects_already_in_shards_do_not_count_as_moved():
    """Pods write 100 rows of two columns. Other pods had already written three of four objects."""
    pods = PolledPods()
    pods.poll()
    pods.pods["a"] |= {"rows": 1, "written": 100, "stored": 50, "touched": 150, "promoted": 10}
    pods.poll()
    assert pods.intake.moved.accesses_per_hour == pytest.approx(60 * (25 + 10) * 2**20)


def test_pods_of_another_namespace_are_not_counted():
    polled = PolledPods()
    polled.namespaces["c"] = polled.namespaces["a"]
    polled.row_bytes["c"], polled.pods["c"] = 1 << 20, dict(polled.pods["a"])
    polled.namespaces["b"], polled.row_bytes["b"] = "77" * 32, 5
    polled.poll()
    polled.pods["a"]["rows"] = polled.pods["b"]["rows"] = 6
    polled.poll()
    assert polled.intake.row_bytes == 1 << 20
    assert polled.intake.traffic.curve.windows[0].accesses_per_hour == pytest.approx(60 * 6)
    assert polled.intake.lower.measured_hits == pytest.approx(0.3)
    assert polled.intake.traffic.num_pods == pytest.approx(3), "all pods have memory"


def test_hours_without_pods_do_not_count():
    """A cluster that is scaled to zero over a weekend has neither accesses nor costs then."""
    polled = PolledPods()
    pods = polled.pods
    for running, num_minutes in ((pods, 24 * 60), ({}, 60 * 60), (pods, 10)):
        polled.pods = running
        for _ in range(num_minutes):
            for counts in running.values():
                counts["rows"] += 10
            polled.poll()
    traffic = polled.intake.traffic
    rate = traffic.curve.windows[0].accesses_per_hour / traffic.num_pods
    assert rate == pytest.approx(600, rel=0.05)


def test_load_rate_is_retained_while_nothing_is_loaded():
    polled = PolledPods()
    polled.poll()
    polled.load_bytes_per_second = 0
    polled.poll()
    assert polled.intake.pods["a"].figures.remote_bytes_per_second == 3e9


TestIntakeModel = IntakeModel.TestCase
TestIntakeModel.settings = hypothesis_settings(max_examples=examples(25), stateful_step_count=20)
