"""A reset of the caches, as before a weight update: KV of the old weights is never read again."""

from dataclasses import replace

import pytest

from testing.deadlines import SIMULATED
from tests.harness.client.fake_model import answer
from tests.harness.scope import third
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, world

DEADLINES = SIMULATED

__all__ = ["world"]

pytestmark = pytest.mark.vllm

NEW = b"new weights"
SHAPES = [
    pytest.param(
        SimSettings(runner=runner, num_drafts=drafts, has_prefix_caching=True, is_async=is_async),
        id=f"runner{runner}-{'drafts' if drafts else 'plain'}-{'async' if is_async else 'sync'}",
    )
    for runner in (1, 2)
    for drafts, is_async in ((0, False), (3, False), (0, True))
]
some_shapes = pytest.mark.parametrize("settings", third(SHAPES))


def reset(engine, new_weights=NEW):
    """Reset the caches, once the engine accepts it: it waits for requests that load."""
    for _ in range(10_000):
        if engine.reset(new_weights):
            return
        engine.step()
    raise AssertionError("the engine can't be reset")


@pytest.mark.parametrize("settings", SHAPES)
def test_old_kv_is_not_loaded_and_new_kv_is_stored(world, settings):
    prompt = make_tokens(3 * CHUNK + 5)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        reset(engine)
        for num_cached in (0, 3 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20, NEW)
    assert world.audit(settings, [prompt]) >= 3 * CHUNK  # for engines that still have the old weights


@some_shapes
def test_reset_during_stores_and_requests(world, settings):
    """Chunks of the old weights that are copied after the reset must not be found under the old key."""
    prompts = [make_tokens(3 * CHUNK + 5) for _ in range(3)]
    with world.engines(settings) as (engine,):
        world.store_gate.shut()
        names = [engine.add(prompt, max_tokens=60) for prompt in prompts]
        for _ in range(8):
            engine.step()
        world.store_gate.wait_arrived()
        for _ in range(5):  # a refused engine repeats the reset
            if engine.reset(NEW):
                break
            engine.step()
        world.store_gate.open()
        if not engine.weights:
            reset(engine)
        assert_idle(engine)
        assert all(len(engine.results[name].tokens) == 60 for name in names)
        names = [engine.add(prompt, max_tokens=5) for prompt in prompts]
        assert_idle(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.results[name].num_cached_tokens >= 3 * CHUNK
            assert engine.results[name].tokens == answer(prompt, 5, NEW)
    world.audit(settings, prompts)


@some_shapes
def test_reset_during_a_load(world, settings):
    prompt = make_tokens(3 * CHUNK + 5)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        world.load_gate.shut()
        name = engine.add(prompt, max_tokens=10)
        while not world.load_gate.num_waiting:
            engine.step()
        engine.reset(NEW)  # the reset is refused, or the load is discarded
        world.load_gate.open()
        if not engine.weights:
            reset(engine)
        assert_idle(engine)
        second_name = engine.add(prompt, max_tokens=10)
        assert_idle(engine)
        assert engine.results[second_name].tokens == answer(prompt, 10, NEW)
        assert len(engine.results[name].tokens) == 10


@some_shapes
def test_reset_of_the_engines_own_cache_during_a_store(world, settings):
    """vLLM preempts all requests between two steps, and reuses their blocks in the next step."""
    settings = replace(settings, num_blocks=40)
    prompts = [make_tokens(4 * CHUNK) for _ in range(4)]
    with world.engines(settings) as (engine,):
        world.store_gate.shut()
        for prompt in prompts[:2]:
            engine.add(prompt, max_tokens=20)
        for _ in range(4):  # so few that no request ends: vLLM cannot drop blocks that are held
            engine.step()
        world.store_gate.wait_arrived()
        engine.forget(also_of_running=True)
        for prompt in prompts[2:]:
            engine.add(prompt, max_tokens=20)
        for _ in range(4):
            engine.step()
        world.store_gate.open()
        assert_idle(engine)
    world.audit(settings, prompts)
