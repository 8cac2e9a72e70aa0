"""Sizes from pods' samples: simulated pods with exact tiers, polled every minute, and their failures."""

from functools import cache

import pytest

from lmcache_operator.autoscaling.intake.lookups import NoAnswer
from lmcache_operator.autoscaling.sizing import Situation, Sizing, SizingSettings, UnavailableSize
from lmcache_operator.policy.report import MAX_STATE_BYTES, Choice, Saved, restore, save
from lmcache_operator.policy.state import Obstacle
from lmcache_operator.policy.tier import GIB, Prices
from testing.workloads.closed_loop import Setup
from testing.workloads.requests import Request, Workload, chat
from tests.harness.operator.sizing_loop import AUTO, SIZE, START, Loop


def test_samples_lead_to_the_best_size_despite_clock_and_restart():
    """The clock of a pod is a minute ahead, the other pod samples half of the keys, and a pod restarts."""
    loop = Loop()
    loop.sidecars.samplers[0].clock_offset = 61.0
    loop.sidecars.samplers[1].sampler.rate = 0.5
    loop.run(1.5)
    loop.sidecars.restart(0, loop.now)
    loop.run(3.2)
    best, cost = best_of_chat()
    assert cost(loop.sidecars.size_bytes / GIB) <= 1.03 * cost(best)
    assert loop.report.memory == Choice(loop.sidecars.size_bytes, SIZE)
    curve = loop.sizing.intake.traffic.curve
    assert curve.rate == pytest.approx(0.5)
    # The measured hits equal the curve's hits at this size.
    day = curve.windows[0]
    predicted = day.hit_ratio(0.97 * loop.sidecars.size_bytes).hit_ratio
    assert predicted == pytest.approx(day.measured_hits, abs=0.05)
    requests = sum(START + 60 < request.time <= loop.now for request in loop.workload.requests)
    assert 0.5 * requests < loop.sizing.intake.num_samples


@cache
def best_of_chat():
    setup = Setup(chat(5, 0.2, scale=4))
    cost = setup.constant()
    return setup.best_constant()[0], cost


def test_every_report_has_a_reason_and_a_small_state():
    loop = Loop()
    loop.run(1.5)
    assert len(loop.reports) >= 6
    for report in loop.reports:
        assert report.status["memory"]["reason"]
        assert len(report.state.encode()) <= MAX_STATE_BYTES
    status = loop.report.status
    assert (status["window"], status["breakEvenAge"]) == ("24h", "512s")
    assert status["localityLoss"].keys() == {"points", "usdPerHour"}
    assert status["memory"]["keysInSize"] == SIZE // int(loop.workload.row_bytes)
    assert status["memory"]["curve"]


def test_recommendation_chooses_no_size():
    loop = Loop(settings=AUTO._replace(is_memory_auto=False))
    loop.run(2.5)
    assert loop.report.memory is None
    assert loop.memory_status()["recommended"] != "64Gi"
    assert loop.memory_status()["current"] == "64Gi"


def test_restarted_operator_continues_from_the_saved_state():
    loop = Loop()
    loop.run(2.5)
    chosen = loop.report.memory
    assert chosen is not None
    saved = restore(save(loop.report))
    day = loop.sizing.intake.traffic.curve.windows[0].hit_ratio(64 * GIB).hit_ratio
    loop.sizing = Sizing(saved)
    loop.poll()
    assert loop.report.memory == chosen
    assert loop.memory_status()["limitedBy"] != "Young"
    curve = loop.sizing.intake.traffic.curve
    assert curve.windows[0].hit_ratio(64 * GIB).hit_ratio == pytest.approx(day, abs=0.01)
    assert loop.sizing.intake.num_samples == 0  # samples in the ring buffer are read, but not counted again
    assert curve.num_keys > 100


@pytest.mark.parametrize("settings", [AUTO, AUTO._replace(is_memory_auto=False)])
def test_saved_state_is_retained_until_new_samples_exist(settings):
    """No pod runs after a restart of the operator, or pods do not answer, and the operator restarts again."""
    loop = Loop()
    loop.run(2.5)
    saved = restore(save(loop.report))
    for uids in ({}, {"uid-0": "pod-0"}):
        restarted = Sizing(saved)
        answers = {uid: NoAnswer("its sidecar does not answer") for uid in uids}
        assert list(restarted.intake.take(loop.now, uids, (1.0, 2.0), answers, 1000)) == []
        report = restarted.decide(loop.now + 900, Situation(settings, uids))
        assert report.state == saved.state
        assert report.memory == (saved.memory if settings.is_memory_auto else None)


@pytest.mark.parametrize(
    "state", ["", "{", "[]", "{}", '{"memory": {}}', '{"memory": 1, "remote": 2, "traffic": 3}']
)
def test_state_of_another_version_is_dropped_and_the_choice_is_retained(state):
    loop = Loop(sizing=Sizing(Saved(Choice(SIZE, SIZE), None, state)))
    loop.run(0.3)
    assert (loop.report.memory, loop.memory_status()["limitedBy"]) == (Choice(SIZE, SIZE), "Young")


def memory_of(loop: Loop) -> tuple[object, object]:
    return loop.memory_status()["limitedBy"], loop.memory_status()["reason"]


def decide_now(loop: Loop, situation: Situation | None = None) -> tuple[object, object]:
    loop.situation = situation or loop.situation
    loop.report = loop.sizing.decide(loop.now, loop.situation)
    return memory_of(loop)


def test_silent_pods_are_reported_and_prevent_a_decision():
    loop = Loop()
    loop.run(0.4)
    loop.refusals["uid-1"] = NoAnswer("its sidecar does not answer")
    loop.run(0.04)
    assert decide_now(loop)[0] == "Young"  # two missed polls are fewer than three
    loop.run(1.0)
    reason = "1 of 2 pods return no usable samples (pod-1: its sidecar does not answer)"
    assert decide_now(loop) == ("Samples", reason)
    assert loop.report.memory is None
    del loop.refusals["uid-1"]
    loop.poll()
    assert decide_now(loop)[0] != "Samples"


def test_missing_measurements_are_reported():
    loop = Loop()
    stats = loop.sidecars.stats
    loop.sidecars.stats = lambda pod: stats(pod) | {"lookups": stats(pod)["lookups"] | {"gpus": 0}}
    loop.run(0.6)
    assert decide_now(loop) == ("Samples", "sidecars have not measured yet: gpus")


def test_report_has_a_reason_before_the_first_lookup():
    loop = Loop(workload=Workload([Request(START + 1e9, 0, (1,))]))
    loop.poll()
    assert memory_of(loop) == ("Samples", "no lookups were counted")
    assert decide_now(loop, loop.situation._replace(pods={})) == ("Samples", "no pod is running")


def test_rollout_delays_a_decision():
    loop = Loop()
    loop.run(1.0, follow=False)
    rollout = Obstacle("Cooldown", "1 of 2 pods are ready and match the spec")
    assert decide_now(loop, loop.situation._replace(obstacle=rollout)) == rollout


def loop_with_choice() -> Loop:
    """A loop that has chosen a size that no pod has yet."""
    loop = Loop()
    while not (loop.report and loop.report.memory):
        loop.poll()
    return loop


def test_resize_in_progress_delays_decisions_and_is_then_judged():
    loop = loop_with_choice()
    chosen = loop.report.memory
    loop.run(0.5, follow=False)
    assert loop.report.memory == chosen
    assert loop.memory_status()["reason"].startswith("resizing pods: 0 of 2 pods have ")
    num_reports = len(loop.reports)
    loop.resize(chosen.size)
    loop.poll()
    assert len(loop.reports) == num_reports + 1  # the decision is due as soon as all pods have the size
    assert loop.memory_status()["limitedBy"] in ("Cooldown", "Verifying")
    assert "result in" in loop.memory_status()["reason"]
    assert loop.report.memory == chosen


def test_unavailable_size_is_dropped():
    loop = loop_with_choice()
    unavailable = UnavailableSize(loop.report.memory.size, "pod pod-1: its node has no free memory")
    loop.situation = loop.situation._replace(refusals=(unavailable,))
    loop.poll()
    assert memory_of(loop) == ("Infeasible", "pod pod-1: its node has no free memory")
    assert loop.report.memory == Choice(SIZE, SIZE)
    loop.run(1.0, follow=False)
    assert loop.report.memory == Choice(SIZE, SIZE)


def test_size_changed_in_the_spec_replaces_the_choice():
    loop = loop_with_choice()
    loop.situation = loop.situation._replace(settings=AUTO._replace(memory=32 << 30))
    loop.resize(32 << 30)
    loop.poll()
    assert loop.report.memory is None


def test_new_namespace_restarts_counting():
    loop = Loop()
    loop.run(1.0, follow=False)
    loop.sidecars.namespace = "77" * 32
    loop.poll()
    assert decide_now(loop) == ("Young", "lookups counted for 0s; a decision needs 30m")
    assert loop.sizing.intake.traffic.namespace == "77" * 32


def test_small_change_of_bounds_keeps_the_traffic():
    loop = Loop()
    loop.run(0.6)
    traffic = loop.sizing.intake.traffic
    bounds = AUTO._replace(memory_bounds=(20 << 30, 400 << 30))
    loop.situation = loop.situation._replace(settings=bounds)
    loop.poll()
    assert loop.sizing.intake.traffic is traffic
    loop.situation = loop.situation._replace(settings=AUTO._replace(memory_bounds=(1 << 30, 4 << 40)))
    loop.poll()
    assert loop.sizing.intake.traffic is not traffic
    assert decide_now(loop)[0] == "Young"


def test_state_is_small_for_any_bounds_and_stable_without_traffic():
    bounds, prices = (64 << 20, 16 << 40), Prices(2.5, 0.004, 0.004)
    widest = SizingSettings(SIZE, bounds, prices, shards=4, shard_bounds=(1, 64), shard_bytes=16 << 40)
    loop = Loop(settings=widest)
    loop.run(1.0)
    loop.following = Request(START + 1e9, 0, (1,))
    loop.run(0.5)
    state = loop.report.state
    assert 100 < len(state.encode()) <= MAX_STATE_BYTES
    assert set(loop.report.status["remote"]) >= {"current", "recommended", "next", "reason", "limitedBy"}
    loop.run(1.0)
    assert loop.report.state == state


def test_token_price_averages_a_day():
    """Sidecars measure their engine at each step. Long prompts slow the engine by ten for a minute."""
    loop = Loop()
    loop.run(2.0, follow=False)
    stats = loop.sidecars.stats

    def slow_stats(pod: int):
        pod_stats = stats(pod)
        pod_stats["lookups"]["prefill_tokens_per_second"] = 1_000
        return pod_stats

    loop.sidecars.stats = slow_stats
    loop.poll()
    status = loop.sizing.decide(loop.now, loop.situation).status
    assert 512 <= int(status["breakEvenAge"][:-1]) <= 1.25 * 512
