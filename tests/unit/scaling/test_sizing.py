"""From what pods say to sizes: pods with exact tiers, minute by minute, and all that can go wrong."""

from __future__ import annotations

from functools import cache

import pytest
from lmcache_operator.autoscaling.report import MAX_STATE_BYTES, Choice, Saved, restore, save
from lmcache_operator.autoscaling.state import Obstacle
from lmcache_operator.autoscaling.tier import GIB, Prices
from lmcache_operator.scaling.intake import Answer, NoAnswer
from lmcache_operator.scaling.sizing import Refused, Settings, Situation, Sizing

from testing.workloads.closed_loop import Setup
from testing.workloads.requests import Request, Workload, chat
from tests.harness.sizing_loop import AUTO, SIZE, START, Loop


def test_what_pods_say_brings_them_to_the_best_size():
    """Though the clock of one is a minute ahead, the other samples half of the keys, and one began anew."""
    loop = Loop()
    loop.sidecars.told[0].clock_offset = 61.0
    loop.sidecars.told[1].sampler.rate = 0.5
    loop.run(1.5)
    loop.sidecars.restart(0, loop.now)
    loop.run(3.2)
    best, cost = best_of_talk()
    assert cost(loop.sidecars.size_bytes / GIB) <= 1.03 * cost(best)
    assert loop.report.memory == Choice(loop.sidecars.size_bytes, SIZE)
    curve = loop.sizing.intake.traffic.curve
    assert curve.rate == pytest.approx(0.5)
    # What was measured is what the curve says of this size.
    day = curve.windows[0]
    assert day.hit_ratio(0.97 * loop.sidecars.size_bytes).hit_ratio == pytest.approx(
        day.measured_hits, abs=0.05
    )
    requests = sum(START + 60 < one.time <= loop.now for one in loop.workload.requests)
    assert 0.5 * requests < loop.sizing.intake.num_samples


@cache
def best_of_talk():
    setup = Setup(chat(5, 0.2, scale=4))
    cost = setup.constant()
    return setup.best_constant()[0], cost


def test_every_report_has_a_reason_and_what_survives_is_small():
    loop = Loop()
    loop.run(1.5)
    assert len(loop.reports) >= 6
    for report in loop.reports:
        assert report.status["memory"]["reason"]
        assert len(report.state.encode()) <= MAX_STATE_BYTES
    status = loop.report.status
    assert status["window"] == "24h"
    assert status["breakEvenAge"] == "512s"
    assert status["localityLoss"].keys() == {"points", "usdPerHour"}
    assert status["memory"]["keysInSize"] == SIZE // int(loop.workload.row_bytes)
    assert status["memory"]["curve"]


def test_a_recommendation_changes_nothing():
    loop = Loop(settings=AUTO._replace(is_memory_auto=False))
    loop.run(2.5)
    assert loop.report.memory is None
    assert loop.told()["recommended"] != "64Gi"
    assert loop.told()["current"] == "64Gi"


def test_a_restart_of_the_operator_goes_on_where_it_was():
    loop = Loop()
    loop.run(2.5)
    chosen = loop.report.memory
    assert chosen is not None
    saved = restore(save(loop.report))
    day = loop.sizing.intake.traffic.curve.windows[0].hit_ratio(64 * GIB).hit_ratio
    loop.sizing = Sizing(saved)
    loop.poll()
    assert loop.report.memory == chosen
    assert loop.told()["limitedBy"] != "Young"
    again = loop.sizing.intake.traffic.curve
    assert again.windows[0].hit_ratio(64 * GIB).hit_ratio == pytest.approx(day, abs=0.01)
    assert loop.sizing.intake.num_samples == 0  # the ring was read, and is not counted again
    assert again.num_keys > 100


@pytest.mark.parametrize("settings", [AUTO, AUTO._replace(is_memory_auto=False)])
def test_what_was_saved_is_kept_until_there_is_something_else(settings):
    """No pod runs when the operator starts again, or they have nothing to do; then it starts once more."""
    loop = Loop()
    loop.run(2.5)
    saved = restore(save(loop.report))
    for uids in ({}, {"uid-0": "pod-0"}):
        again = Sizing(saved)
        said = {uid: NoAnswer("it does not answer") for uid in uids}
        assert list(again.intake.take(loop.now, uids, (1.0, 2.0), said, 1000)) == []
        report = again.decide(loop.now + 900, Situation(settings, uids))
        assert report.state == saved.state
        assert report.memory == (saved.memory if settings.is_memory_auto else None)


@pytest.mark.parametrize(
    "state", ["", "{", "[]", "{}", '{"memory": {}}', '{"memory": 1, "remote": 2, "traffic": 3}']
)
def test_a_state_of_another_version_is_left_and_the_chosen_size_is_kept(state):
    loop = Loop(sizing=Sizing(Saved(Choice(SIZE, SIZE), None, state)))
    loop.run(0.3)
    assert loop.report.memory == Choice(SIZE, SIZE)
    assert loop.told()["limitedBy"] == "Young"


def grown_loop() -> Loop:
    """Its next decision would be a growth."""
    loop = Loop()
    loop.run(1.0, follow=False)
    loop.report = None
    loop.settings = AUTO
    return loop


def decided(loop: Loop, situation: Situation | None = None) -> tuple[object, object]:
    loop.situation = situation or loop.situation
    loop.report = loop.sizing.decide(loop.now, loop.situation)
    return loop.told()["limitedBy"], loop.told()["reason"]


def test_pods_that_do_not_answer_are_told_and_nothing_is_decided():
    loop = Loop()
    loop.run(0.4)
    loop.refusals["uid-1"] = NoAnswer("it does not answer")
    loop.run(0.04)
    assert decided(loop)[0] == "Young"  # two polls are not three
    loop.run(1.0)
    assert decided(loop) == ("Samples", "1 of 2 pods say nothing of use (pod-1: it does not answer)")
    assert loop.report.memory is None
    del loop.refusals["uid-1"]
    loop.poll()
    assert decided(loop)[0] != "Samples"


def test_samples_that_were_lost_are_told():
    loop = Loop()
    loop.run(0.6)
    loop.sidecars.told[0].sampler._max_samples = 5
    loop.poll()
    assert decided(loop) == ("Samples", "samples of pod-0 were lost before they were read")


def test_what_pods_do_not_know_yet_is_told():
    loop = Loop()
    told = loop.sidecars.stats
    loop.sidecars.stats = lambda pod: told(pod) | {"lookups": told(pod)["lookups"] | {"gpus": 0}}
    loop.run(0.6)
    assert decided(loop) == ("Samples", "sidecars do not know yet: gpus")


def test_before_anything_was_looked_up_there_is_a_reason():
    loop = Loop(workload=Workload([Request(START + 1e9, 0, (1,))]))
    loop.poll()
    assert (loop.told()["limitedBy"], loop.told()["reason"]) == ("Samples", "nothing was looked up")
    assert decided(loop, loop.situation._replace(pods={})) == ("Samples", "no pod runs")


def test_a_rollout_is_waited_for():
    loop = grown_loop()
    rollout = Obstacle("Cooldown", "1 of 2 pods are ready and as declared")
    assert decided(loop, loop.situation._replace(obstacle=rollout)) == rollout


def asked_loop() -> Loop:
    """It has chosen a size that no pod has yet."""
    loop = Loop()
    while not (loop.report and loop.report.memory):
        loop.poll()
    return loop


def test_a_change_under_way_is_waited_for_and_then_judged():
    loop = asked_loop()
    chosen = loop.report.memory
    loop.run(0.5, follow=False)
    assert loop.report.memory == chosen
    assert loop.told()["reason"].startswith("a change of size is under way: 0 of 2 pods have ")
    num_reports = len(loop.reports)
    loop.resize(chosen.size)
    loop.poll()
    assert len(loop.reports) == num_reports + 1  # decided as soon as all have it
    assert loop.told()["limitedBy"] in ("Cooldown", "Verifying")
    assert "is seen in" in loop.told()["reason"]
    assert loop.report.memory == chosen


def test_a_size_that_a_pod_can_not_have_is_given_up():
    loop = asked_loop()
    refused = Refused(loop.report.memory.size, "pod pod-1: its node has no room")
    loop.situation = loop.situation._replace(refusals=(refused,))
    loop.poll()
    assert (loop.told()["limitedBy"], loop.told()["reason"]) == (
        "Infeasible",
        "pod pod-1: its node has no room",
    )
    assert loop.report.memory == Choice(SIZE, SIZE)
    loop.run(1.0, follow=False)
    assert loop.report.memory == Choice(SIZE, SIZE)


def test_who_declares_another_size_means_that_one():
    loop = asked_loop()
    loop.situation = loop.situation._replace(settings=AUTO._replace(memory=32 << 30))
    loop.resize(32 << 30)
    loop.poll()
    assert loop.report.memory is None


def test_other_keys_begin_anew():
    loop = Loop()
    loop.run(1.0, follow=False)
    loop.sidecars.namespace = "77" * 32
    loop.poll()
    limited_by, reason = decided(loop)
    assert limited_by == "Young"
    assert reason == "counted for 0 min so far"
    assert loop.sizing.intake.traffic.namespace == "77" * 32


def test_one_pod_of_another_model_is_left_out():
    """More than half have to say so."""
    loop = Loop()
    loop.run(0.5)
    asked, other = loop.ask, "77" * 32
    loop.ask = lambda pod: (
        (found._replace(samples=found.samples._replace(namespace=other)) if pod else found)
        if isinstance(found := asked(pod), Answer)
        else found
    )
    before = loop.sizing.intake.num_samples
    loop.run(0.2)
    assert loop.sizing.intake.traffic.namespace != other
    assert loop.sizing.intake.num_samples > before


def test_bounds_that_change_a_little_lose_nothing():
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
    assert decided(loop)[0] == "Young"


def test_what_survives_is_small_for_any_bounds_and_the_same_at_rest():
    widest = Settings(
        SIZE,
        (64 << 20, 16 << 40),
        Prices(2.5, 0.004, 0.004),
        shards=4,
        shard_bounds=(1, 64),
        shard_bytes=16 << 40,
    )
    loop = Loop(settings=widest)
    loop.run(1.0)
    loop.following = Request(START + 1e9, 0, (1,))
    loop.run(0.5)
    state = loop.report.state
    assert 100 < len(state.encode()) <= MAX_STATE_BYTES
    assert set(loop.report.status["remote"]) >= {"current", "recommended", "next", "reason", "limitedBy"}
    loop.run(1.0)
    assert loop.report.state == state


def test_the_price_of_a_token_is_that_of_the_day_and_not_of_the_moment():
    """Sidecars measure their engine at each step. Long prompts make it ten times as slow for a minute."""
    loop = Loop()
    loop.run(2.0, follow=False)
    stats = loop.sidecars.stats

    def slow(pod: int):
        found = stats(pod)
        found["lookups"]["prefill_tokens_per_second"] = 1_000
        return found

    loop.sidecars.stats = slow
    loop.poll()
    status = loop.sizing.decide(loop.now, loop.situation).status
    assert 512 <= int(status["breakEvenAge"][:-1]) <= 1.25 * 512
