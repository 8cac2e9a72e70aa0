"""Agents' requests, their truthful and wrong hints, and the replay of both."""

import pytest

from benchmarks.hints import WRONG, hit_percent, none, truthful
from lmcache_store.hints import HintKind
from testing.workloads.agents import NO_SESSION, Hint, agent_steps
from testing.workloads.requests import TOKENS, Request

NUM_ROWS = 300


@pytest.fixture(scope="module")
def steps():
    return agent_steps(500)


def test_steps_depend_on_the_seed_alone(steps):
    assert agent_steps(500) == steps
    assert agent_steps(500, seed=1) != steps
    assert [step.time for step in steps] == sorted(step.time for step in steps)


def test_prompts_of_a_session_grow_and_hints_concern_the_latest(steps):
    latest: dict[int, tuple[int, ...]] = {}
    for step in steps:
        former = latest.get(step.session, ())
        if isinstance(step, Hint):
            assert step.keys == former
        elif step.session != NO_SESSION:
            assert step.keys[: len(former)] == former
            latest[step.session] = step.keys


def test_sessions_share_what_a_release_leaves(steps):
    shared = {
        step.keys[: step.action.begin_token // TOKENS]
        for step in steps
        if isinstance(step, Hint) and step.action.kind is HintKind.RELEASE
    }
    assert 1 < len(shared) <= 4


def test_most_retained_prompts_return_in_time(steps):
    num_in_time = num_retained = 0
    for position, step in enumerate(steps):
        end = step.time + step.action.ttl_seconds if isinstance(step, Hint) else 0.0
        if step.time < end < steps[-1].time and step.action.kind is HintKind.RETAIN:
            num_retained += 1
            later = (after for after in steps[position + 1 :] if after.session == step.session)
            following = next(later, None)
            num_in_time += following is not None and following.time <= end
    assert num_in_time > 0.85 * num_retained > 10


@pytest.mark.parametrize("name", WRONG)
def test_wrong_hints_differ_from_truthful_ones_and_leave_requests(steps, name):
    wrong = list(WRONG[name](steps))
    assert list(none(wrong)) == [step for step in steps if isinstance(step, Request)]
    hints = [step for step in wrong if isinstance(step, Hint)]
    assert hints
    assert hints != [step for step in steps if isinstance(step, Hint)]


def test_truthful_hints_hit_more(steps):
    percent = {hints: hit_percent(hints(steps), NUM_ROWS) for hints in (none, truthful)}
    assert percent[none] < percent[truthful] <= hit_percent(none(steps), 100 * NUM_ROWS)
