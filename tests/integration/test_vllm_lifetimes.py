"""What is committed is what its key says, and what is loaded is right, whenever blocks are taken back.

vLLM's scheduler, block pool and runner hooks are the real ones, so are the connector and the sidecar; the
model is not (``tests/harness/sim_engine.py``). Copies are held back at gates: each race is lost on purpose.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.fake_model import answer
from tests.harness.sim_config import CHUNK, SimSettings
from tests.harness.sim_world import assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

SHAPES = [
    pytest.param(
        SimSettings(runner=runner, num_drafts=drafts, is_async=is_async),
        id=f"runner{runner}-{'drafts' if drafts else 'plain'}-{'async' if is_async else 'sync'}",
    )
    for runner in (1, 2)
    for drafts in (0, 3)
    for is_async in (False, True)
]
every_shape = pytest.mark.parametrize("settings", SHAPES)


@every_shape
def test_a_hit_is_what_was_computed(world, settings):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(settings) as (engine,):
        for num_cached in (0, 5 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)


@every_shape
def test_a_chunk_that_the_last_step_completes_is_stored_before_its_blocks_are_given_back(world, settings):
    """Accepted drafts can complete a chunk in the last step: its store begins when the request is over."""
    prompt = make_tokens(CHUNK - 40)  # with a few steps, so that its lookup is answered meanwhile
    with world.engines(settings) as (engine,):
        other = engine.add(make_tokens(CHUNK // 2), max_tokens=400)  # so that no step is an idle one
        engine.step()
        world.store_gate.shut()
        name = engine.add(prompt, max_tokens=41)
        engine.run(name)
        for _ in range(5):
            engine.step()
        assert engine.results[other].finish_reason is None
        world.store_gate.open()
        assert_idle(engine)
    assert world.audit(settings, [prompt + engine.results[name].tokens]) == CHUNK


@every_shape
def test_a_preempted_request_s_late_copy_is_not_committed(world, settings):
    prompts = [make_tokens(4 * CHUNK) for _ in range(4)]
    with world.engines(replace(settings, num_blocks=40)) as (engine,):
        world.store_gate.shut()
        names = [engine.add(prompt, max_tokens=200) for prompt in prompts]
        while not engine.num_preemptions:
            engine.step()
        for _ in range(3):
            engine.step()
        world.store_gate.open()
        assert_idle(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.results[name].tokens == answer(prompt, 200)
    assert world.audit(settings, [p + engine.results[n].tokens for n, p in zip(names, prompts, strict=True)])


def test_blocks_that_were_held_too_long_are_given_back_and_their_copies_not_committed(world):
    """A store that does not end must not starve the engine of blocks."""
    settings = SimSettings()
    prompt = make_tokens(2 * CHUNK)
    with world.engines(settings) as (engine,):
        world.store_gate.shut()
        engine.add(prompt, max_tokens=20)
        assert_idle(engine)  # after the longest time that blocks are held
        engine.add(make_tokens(CHUNK // 2))
        engine.run()
        world.store_gate.open()
    assert world.audit(settings, [prompt]) == 0


@every_shape
def test_an_aborted_request_s_blocks_are_its_own_until_its_load_ended(world, settings):
    prompt = make_tokens(4 * CHUNK + 1)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        world.load_gate.shut()
        name = engine.add(prompt)
        while not world.load_gate.num_waiting:
            engine.step()
        engine.abort(name)
        others = [engine.add(make_tokens(4 * CHUNK), max_tokens=4) for _ in range(4)]
        engine.run(*others)
        world.load_gate.open()
        assert_idle(engine)
        again = engine.add(prompt)
        assert_idle(engine)
        assert engine.results[again].num_cached_tokens == 4 * CHUNK


def test_two_engines_that_compute_the_same_prompt_at_once(world):
    settings = SimSettings(has_prefix_caching=True)
    prompt = make_tokens(6 * CHUNK)
    with world.engines(settings, replace(settings, runner=2)) as engines:
        world.store_gate.shut()
        names = [engine.add(prompt, max_tokens=30) for engine in engines]
        for _ in range(10):
            for engine in engines:
                engine.step()
        world.store_gate.open()
        for engine, name in zip(engines, names, strict=True):
            assert_idle(engine)
            assert engine.results[name].tokens == answer(prompt, 30)
    assert world.audit(settings, [prompt]) >= 5 * CHUNK
