"""A reset of the caches, as before a weight update: KV of the old weights is never read again."""

from dataclasses import replace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from testing.deadlines import SIMULATED
from tests.harness.client.fake_model import answer
from tests.harness.scope import third
from tests.harness.sim.config import BLOCK, CHUNK, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, serving_world, wait_attached, world

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


needs_manager = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"), reason="vLLM 0.29 refuses resets during loads"
)


@pytest.mark.parametrize("settings", SHAPES)
def test_old_kv_is_not_loaded_and_new_kv_is_stored(world, settings):
    prompt = make_tokens(3 * CHUNK + 5)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        assert engine.reset(NEW)
        for num_cached in (0, 3 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20, NEW)
    assert world.audit(settings, [prompt]) >= 3 * CHUNK  # for engines that still have the old weights


@pytest.mark.parametrize("num_parts", [1, 2])
def test_new_kv_is_found_after_a_restart_of_the_sidecars(num_parts):
    """A sidecar lists rows from before its restart only when a lookup has verified them."""
    prompt = make_tokens(3 * CHUNK + 5)
    settings = SimSettings(tensor_parallel=num_parts, num_parts=num_parts)
    with serving_world(settings) as world, world.engines(settings) as (engine,):
        assert engine.reset(NEW)
        engine.serve(prompt)
        for sidecar in world.sidecars:
            sidecar.settled()  # rows without a checksum are not adopted
            sidecar.restart()
        wait_attached(engine)
        for _ in range(2):  # a part may still verify its rows during the first request
            name = engine.serve(prompt)
        assert engine.results[name].num_cached_tokens == 3 * CHUNK


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
        assert engine.reset(NEW)
        world.store_gate.open()
        assert_idle(engine)
        assert all(len(engine.results[name].tokens) == 60 for name in names)
        names = [engine.add(prompt, max_tokens=5) for prompt in prompts]
        assert_idle(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.results[name].num_cached_tokens >= 3 * CHUNK
            assert engine.results[name].tokens == answer(prompt, 5, NEW)
    world.audit(settings, prompts)


@needs_manager
@some_shapes
def test_reset_during_loads(world, settings):
    """A paused engine computes nothing, so requests hold their blocks also after their loads have ended."""
    settings = replace(settings, num_blocks=96)
    prompts = [make_tokens(3 * CHUNK + 5) for _ in range(4)]
    with world.engines(settings) as (engine,):
        names = [engine.add(prompt, max_tokens=60) for prompt in prompts[1:]]
        engine.add(prompts[0])
        assert_idle(engine)
        world.load_gate.shut()
        names = [engine.add(prompt, max_tokens=10) for prompt in prompts]
        while not world.load_gate.num_waiting:
            engine.step()
        assert not engine.reset(b"never", max_steps=10), "a copy still writes to the engine's blocks"
        engine.pause()
        world.load_gate.open()
        assert engine.reset(NEW)
        assert_idle(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.results[name].tokens == answer(prompt, 10, NEW)
        assert not engine.leftovers()
        name = engine.add(prompts[0], max_tokens=10)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 3 * CHUNK
        assert engine.results[name].tokens == answer(prompts[0], 10, NEW)
    world.audit(settings, prompts)


@needs_manager
def test_reset_while_a_loaded_request_waits_for_blocks(world):
    """vLLM has begun to schedule the request after its load, but another request took the last block."""
    settings = SimSettings(num_blocks=40)
    prompt, other_prompt = make_tokens(3 * CHUNK + 5), make_tokens(25 * BLOCK)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        world.load_gate.shut()
        other_name = engine.add(other_prompt, max_tokens=3 * BLOCK)
        pool = engine.scheduler.kv_cache_manager.block_pool
        while pool.get_num_free_blocks() > 14:
            engine.step()
        name = engine.add(prompt, max_tokens=20)
        while pool.get_num_free_blocks():
            engine.step()
        world.load_gate.open()
        while engine.scheduler.requests[name].status != RequestStatus.WAITING:
            engine.step()
        assert engine.scheduler.requests[name].num_computed_tokens
        assert engine.reset(NEW)
        assert_idle(engine)
        assert engine.results[name].tokens == answer(prompt, 20, NEW)
        assert len(engine.results[other_name].tokens) == 3 * BLOCK


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


@needs_manager
def test_reset_of_the_engines_own_cache_after_new_weights(world):
    """Requests continue KV of old weights until the reset. The result is not found after it."""
    settings = SimSettings(has_prefix_caching=True)
    prompt = make_tokens(3 * CHUNK + 5)
    with world.engines(settings) as (engine,):
        engine.add(prompt[: 2 * CHUNK])
        engine.run()
        engine.scheduler.connector._scheduler.note_change("call of update_weights")
        engine.weights = NEW
        engine.add(prompt)
        engine.run()
        assert engine.wrong_reads, "vLLM finds old KV in its own cache"
        engine.wrong_reads.clear()
        engine.forget()
        for num_cached in (0, 3 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20, NEW)
