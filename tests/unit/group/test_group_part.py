"""When a part of a group starts and ends vLLM: cases, and random histories of a group in virtual time."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_client.group.channel import PartIdentity
from lmcache_client.group.part import ABORT_SECONDS, SILENCE_SECONDS, Exit, LogLine, Phase
from tests.harness.group import DRAIN_BOUND, DRAIN_SECONDS, HANGS, LOSS_BOUND, NOTICE_SECONDS, Pod, Simulation
from tests.harness.scope import examples


class Histories(RuleBasedStateMachine):
    """Faults of a group in any order."""

    @initialize(nodes=st.integers(2, 4), has_one_server=st.booleans(), seconds=st.integers(0, 1))
    def create(self, nodes: int, has_one_server: bool, seconds: int) -> None:
        self.group = Simulation(nodes, has_one_server)
        self.group.pass_time(seconds)

    def pod(self, data: st.DataObject) -> Pod:
        return data.draw(st.sampled_from(self.group.pods))

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds: int) -> None:
        self.group.pass_time(seconds)

    @rule(data=st.data(), status=st.sampled_from([0, 1, -9]))
    def vllm_exits(self, data: st.DataObject, status: int) -> None:
        pod = self.pod(data)
        if pod.is_running:
            self.group.run(pod, pod.part.exited(status))

    @rule(data=st.data())
    def launcher_is_killed(self, data: st.DataObject) -> None:
        """The container ends without a message: its memory is exhausted, or its node fails."""
        pod = self.pod(data)
        if pod.exit is None:
            self.group.end(pod, Exit(137, ""))

    @rule(data=st.data())
    def pod_terminates(self, data: st.DataObject) -> None:
        pod = self.pod(data)
        if pod.exit is None:
            self.group.terminate(pod)

    @rule(rank=st.integers(1, 3))
    def cut_network(self, rank: int) -> None:
        if rank < self.group.nodes:
            self.group.cut.setdefault(rank, self.group.now)

    @rule()
    def repair_network(self) -> None:
        self.group.cut.clear()

    @rule(seconds=st.sampled_from([0.0, 3.0, 12.0, HANGS]))
    def vllm_takes(self, seconds: float) -> None:
        self.group.lifetime = seconds

    @rule(rank=st.integers(-1, 5), nodes=st.integers(1, 5), revision=st.sampled_from(["r1", "r2"]))
    def pod_asks_to_join(self, rank: int, nodes: int, revision: str) -> None:
        """A pod of another size or revision, or the second one with a rank, cannot join."""
        leader = self.group.pods[0]
        is_free = 0 < rank < self.group.nodes and rank not in leader.links
        can_join = is_free and nodes == self.group.nodes and revision == "r1" and not leader.is_running
        reason = leader.part.refusal(PartIdentity(rank, nodes, revision, "other"))
        assert (not reason) == can_join or leader.exit

    @rule(data=st.data(), text=st.sampled_from(["", "x", "start", "start 1.2.3.4", "beat beat", "\0"]))
    def message_of_another_release(self, data: st.DataObject, text: str) -> None:
        """Unknown words have no effect. Nor has ``start`` of a follower or in a running part."""
        pod = self.pod(data)
        if pod.links and pod.exit is None and (pod.is_leader or pod.is_running):
            phase, rank = pod.part.phase, data.draw(st.sampled_from(sorted(pod.links)))
            assert pod.part.received(rank, text, self.group.now) == []
            assert pod.part.phase is phase

    @invariant()
    def vllm_runs_with_one_incarnation(self) -> None:
        """Only until the bound after a loss, other parts run, or parts of two incarnations."""
        running = [pod for pod in self.group.pods if pod.is_running]
        unbroken = {pod.group for pod in running if pod.group.broken_since is None}
        assert len(unbroken) <= 1
        assert all(pod.exit is None for group in unbroken for pod in group.pods)

    def teardown(self) -> None:
        """Without faults, all parts run again, in one incarnation."""
        self.group.cut.clear()
        self.group.lifetime = 0.0
        self.group.pass_time(DRAIN_BOUND + LOSS_BOUND)
        assert_runs(self.group)


Histories.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40)
test_group_histories = Histories.TestCase


# ---- cases ----


def assert_runs(group: Simulation) -> None:
    assert all(pod.is_running for pod in group.pods)
    assert len({pod.group for pod in group.pods}) == 1
    assert {pod.part.phase for pod in group.pods} == {Phase.RUNNING}


@pytest.fixture
def group() -> Simulation:
    group = Simulation(3)
    group.pass_time(1)
    assert_runs(group)
    return group


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("status", "how", "code"),
    [(1, "exited with 1", 1), (0, "exited with 0", 1), (-9, "was killed by signal 9", 137)],
)
def test_last_line_of_all_parts_names_the_part_whose_vllm_exits(group, rank, status, how, code) -> None:
    group.run(group.pods[rank], group.pods[rank].part.exited(status))
    group.pass_time(2)
    cause = f"part {rank} of 3 (pod-{rank}) ended: vLLM {how}"
    assert group.exits[0] == (rank, Exit(code, cause))
    # "error: ", because the operator quotes a container's output from there.
    assert sorted(group.exits[1:]) == [
        (each, Exit(1, f"error: {cause}")) for each in range(3) if each != rank
    ]
    assert_runs(group)


def test_lost_and_silent_parts_are_causes(group) -> None:
    group.end(group.pods[2], Exit(137, ""))
    group.pass_time(2)
    assert group.exits[1:] == [
        (rank, Exit(1, "error: part 2 of 3 (pod-2) closed its link")) for rank in (0, 1)
    ]
    group.exits.clear()
    group.cut[1] = group.now
    group.pass_time(7)
    silent = "error: part {} of 3 (pod-{}) was silent for 5 s"
    assert sorted(group.exits) == [
        (0, Exit(1, silent.format(1, 1))),
        (1, Exit(1, silent.format(0, 0))),
        (2, Exit(1, silent.format(1, 1))),
    ]


def test_a_pause_of_all_nodes_is_no_silence(group) -> None:
    """Virtual machines may pause together. If only one node pauses, the other parts end the group."""
    group.now += 180.0
    group.pass_time(10)
    assert group.exits == []
    group.frozen.add(1)
    group.pass_time(SILENCE_SECONDS + 1)
    assert [rank for rank, _ in group.exits] == [0, 2]
    group.frozen.clear()
    group.pass_time(2)
    assert group.exits[2:] == [(1, Exit(1, "error: part 1 of 3 (pod-1) was silent for 5 s"))]


def test_a_heartbeat_that_is_read_after_a_pause_is_not_newer_than_now(group) -> None:
    """A part whose node is lost in the pause is found as soon as without one."""
    group.now += 3600.0
    group.pods[0].part.received(1, "beat", group.now)
    group.frozen.add(1)
    group.pass_time(SILENCE_SECONDS + 1)
    assert [rank for rank, _ in group.exits] == [0, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminating_pod_drains_all_parts(group, rank) -> None:
    """No pod is ready from then on. After the notice, each vLLM gets SIGTERM once and finishes its requests,
    also after other parts have finished.
    """
    group.lifetime = 3.0
    group.terminate(group.pods[rank])
    group.pass_time(NOTICE_SECONDS - 0.5)
    assert [pod.is_open for pod in group.pods] == 3 * [False]
    assert group.signals == []
    group.pass_time(1)
    assert sorted(group.signals) == [(each, signal.SIGTERM) for each in range(3)]
    group.pods[rank].ends_at += 9.0
    group.terminate(group.pods[rank])  # the kubelet or a user may send a second signal
    group.pass_time(13)
    cause = f"part {rank} of 3 (pod-{rank}) was terminated"
    assert group.exits[-1] == (rank, Exit(143, cause))
    assert sorted(group.exits[:-1]) == [
        (each, Exit(1, f"error: {cause}")) for each in range(3) if each != rank
    ]
    assert [number for _, number in group.signals if number is signal.SIGTERM] == 3 * [signal.SIGTERM]


@pytest.mark.parametrize("rank", [0, 1])
def test_headless_vllm_computes_until_the_leaders_has_finished(rank) -> None:
    group = Simulation(3, has_one_server=True)
    group.pass_time(1)
    group.lifetime = 6.0
    group.terminate(group.pods[rank])
    group.pass_time(NOTICE_SECONDS + 5.0)
    assert [pod.is_open for pod in group.pods] == 3 * [False]
    assert group.signals == [(0, signal.SIGTERM)]
    group.pass_time(3)
    terminated = [each for each, number in group.signals if number is signal.SIGTERM]
    assert terminated == [0, 1, 2]
    cause = f"part {rank} of 3 (pod-{rank}) was terminated"
    assert sorted(how.cause.removeprefix("error: ") for _, how in group.exits) == 3 * [cause]


def test_a_loss_ends_headless_vllm_that_waits_in_a_drain() -> None:
    group = Simulation(3, has_one_server=True)
    group.pass_time(1)
    group.lifetime = HANGS / 2
    group.terminate(group.pods[1])
    group.pass_time(NOTICE_SECONDS + 2)
    group.end(group.pods[2], Exit(137, ""))
    group.pass_time(2)
    assert (1, signal.SIGTERM) in group.signals
    assert (1, Exit(143, "part 2 of 3 (pod-2) closed its link")) in group.exits


def test_a_headless_vllm_that_ends_early_ends_the_drain() -> None:
    """Without it, the leader's requests would wait for it until the time of the drain is over."""
    group = Simulation(3, has_one_server=True)
    group.pass_time(1)
    group.lifetime = HANGS / 2
    group.terminate(group.pods[1])
    group.pass_time(NOTICE_SECONDS + 2)
    group.run(group.pods[2], group.pods[2].part.exited(0))
    group.pass_time(ABORT_SECONDS + 2)
    cause = "part 2 of 3 (pod-2) ended: vLLM exited with 0"
    assert sorted(group.exits) == [
        (0, Exit(1, f"error: {cause}")),
        (1, Exit(143, cause)),
        (2, Exit(1, cause)),
    ]


def test_a_drain_that_takes_too_long_ends_with_its_cause() -> None:
    """The launchers kill vLLM in all pods, in any order. This is no loss of a part."""
    group = Simulation(3, has_one_server=True)
    group.pass_time(1)
    group.lifetime = HANGS / 2
    group.terminate(group.pods[1])
    group.pass_time(NOTICE_SECONDS + DRAIN_SECONDS + 2)
    cause = "part 1 of 3 (pod-1) was terminated"
    assert sorted(how.cause.removeprefix("error: ") for _, how in group.exits) == 3 * [cause]


def test_a_loss_ends_the_notice(group) -> None:
    group.terminate(group.pods[1])
    group.pass_time(1)
    group.run(group.pods[2], group.pods[2].part.exited(1))
    group.pass_time(1)
    cause = "part 2 of 3 (pod-2) ended: vLLM exited with 1"
    assert sorted(group.exits) == [
        (0, Exit(1, f"error: {cause}")),
        (1, Exit(143, cause)),
        (2, Exit(1, cause)),
    ]
    terminated = [rank for rank, number in group.signals if number is signal.SIGTERM]
    assert sorted(terminated) == [0, 1]


def test_a_loss_ends_a_drain(group) -> None:
    group.lifetime = HANGS / 2
    group.terminate(group.pods[1])
    group.pass_time(NOTICE_SECONDS + 2)
    group.end(group.pods[2], Exit(137, ""))
    group.pass_time(ABORT_SECONDS + 2)
    assert (0, Exit(1, "error: part 2 of 3 (pod-2) closed its link")) in group.exits
    assert group.signals.count((0, signal.SIGTERM)) == 1
    assert (0, signal.SIGKILL) in group.signals


def test_a_pod_that_terminates_before_the_start_ends_nothing(group) -> None:
    group.end(group.pods[0], Exit(137, ""))
    group.cut[2] = group.now  # so the group remains incomplete
    group.pass_time(20)
    group.exits.clear()
    group.terminate(group.pods[1])
    group.pass_time(2)
    assert group.exits == [(1, Exit(0, "part 1 of 3 (pod-1) was terminated"))]


def test_only_the_leader_orders_a_start() -> None:
    leader = Pod(0, 3).part
    assert leader.joined(1, "pod-1", 0.0) == []
    assert leader.received(1, "start 10.9.9.9", 0.0) == []
    assert leader.phase is Phase.GATHERING


def test_a_waiting_part_reports_every_30_s_for_what_it_waits() -> None:
    leader, follower = Pod(0, 3).part, Pod(1, 3).part
    leader.joined(1, "pod-1", 0.0)
    leader.failed("10.0.0.9: closed its link")
    follower.failed("pod-0 port 9466: cannot connect: Name or service not known")
    lines = []
    for half_seconds in range(2 * 60):
        leader.received(1, "beat", half_seconds / 2)
        lines += [
            line.text
            for part in (leader, follower)
            for line in part.tick(half_seconds / 2)
            if isinstance(line, LogLine)
        ]
    assert lines == 2 * [
        "part 0 of 3 (pod-0) waits for part 2. Last problem: 10.0.0.9: closed its link",
        "part 1 of 3 (pod-1) waits for part 0. Last problem: "
        "pod-0 port 9466: cannot connect: Name or service not known",
    ]
    follower.joined(0, "pod-0", 60.0)
    (line,) = follower.tick(60.5)[1:]
    assert line == LogLine("part 1 of 3 (pod-1) waits for the other parts")


def test_the_first_problem_has_a_line_at_once_and_the_next_ones_wait() -> None:
    """Strangers can cause many problems."""
    leader = Pod(0, 2).part
    assert leader.tick(10.0) == [LogLine("part 0 of 2 (pod-0) waits for part 1")]
    for number in range(3):
        leader.failed(f"10.0.0.{number}: closed its link")
    line = LogLine("part 0 of 2 (pod-0) waits for part 1. Last problem: 10.0.0.2: closed its link")
    assert leader.tick(10.5) == [line]
    leader.failed("10.0.0.3: closed its link")
    assert leader.tick(11.0) == []
