"""Committed KV matches its key and loaded KV is right, whenever blocks are freed or reused.

vLLM's scheduler, block pool and runner hooks are real, and so are the connector and the sidecar. The model is
simulated (``tests/harness/sim/engine.py``). Gates hold copies back, so that each race is lost on purpose.
"""

import threading
from dataclasses import replace

import pytest
from vllm.config import VllmConfig

from testing.child_process import wait_until
from testing.deadlines import CALLS
from tests.harness.client.fake_model import answer
from tests.harness.scope import third
from tests.harness.sim.config import CHUNK, CONNECTOR, SimGroup, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, world

DEADLINES = CALLS

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
some_shapes = pytest.mark.parametrize("settings", third(SHAPES))


@some_shapes
def test_chunk_completed_by_the_last_step_is_stored_before_its_blocks_are_freed(world, settings):
    """Accepted drafts can complete a chunk in the last step: its store begins after the request has ended."""
    prompt = make_tokens(CHUNK - 40)  # its few steps leave time for the answer to its lookup
    with world.engines(settings) as (engine,):
        other = engine.add(make_tokens(CHUNK // 2), max_tokens=400)  # so that no step is idle
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


@some_shapes
def test_late_copy_of_a_preempted_request_is_not_committed(world, settings):
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


def test_blocks_held_too_long_are_freed_and_their_copies_not_committed(world):
    """A store that does not end must not starve the engine of blocks."""
    settings = SimSettings()
    prompt = make_tokens(2 * CHUNK)
    with world.engines(settings) as (engine,):
        world.store_gate.shut()
        engine.add(prompt, max_tokens=20)
        assert_idle(engine)  # after the longest time for which blocks are held
        engine.add(make_tokens(CHUNK // 2))
        engine.run()
        world.store_gate.open()
    assert world.audit(settings, [prompt]) == 0


@some_shapes
def test_blocks_of_an_aborted_request_are_not_reused_before_its_load_ended(world, settings):
    prompt = make_tokens(4 * CHUNK + 1)
    with world.engines(settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        world.load_gate.shut()
        name = engine.add(prompt)
        while not world.load_gate.num_waiting:
            engine.step()
        engine.abort(name)
        competitors = [engine.add(make_tokens(4 * CHUNK), max_tokens=4) for _ in range(4)]
        engine.run(*competitors)
        world.load_gate.open()
        assert_idle(engine)
        second_name = engine.add(prompt)
        assert_idle(engine)
        assert engine.results[second_name].num_cached_tokens == 4 * CHUNK


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_loaded_requests_run_before_a_request_that_gets_no_blocks(world, monkeypatch, runner, is_async):
    """vLLM 0.29 stops at the first queued request, while later requests hold the blocks that it needs."""
    settings = SimSettings(runner=runner, is_async=is_async, num_blocks=48, has_prefix_caching=False)
    stored, other = make_tokens(3 * CHUNK + 10), make_tokens(3 * CHUNK - 5)
    with world.engines(settings) as (engine,):
        engine.add(stored)
        assert_idle(engine)
        connector, pool = engine.scheduler.connector, engine.scheduler.kv_cache_manager.block_pool
        answer_for = connector.get_num_new_matched_tokens
        is_answered = threading.Event()

        def answer_late(request, num_computed_tokens):
            if request.request_id == first and not is_answered.is_set():
                return None, False
            return answer_for(request, num_computed_tokens)

        monkeypatch.setattr(connector, "get_num_new_matched_tokens", answer_late)
        first = engine.add(other, max_tokens=5)  # 12 blocks
        engine.step()
        world.load_gate.shut()
        loading = [engine.add(stored, max_tokens=3) for _ in range(3)]  # 36 blocks of 47
        wait_until(lambda: engine.step() or pool.get_num_free_blocks() == 11, what="three loads")
        is_answered.set()
        engine.step()
        world.load_gate.open()
        engine.run(first, *loading)
        assert engine.results[first].tokens == answer(other, 5)
        for name in loading:
            assert engine.results[name].tokens == answer(stored, 3)
            assert engine.results[name].num_cached_tokens == 3 * CHUNK
        assert_idle(engine)


@pytest.mark.parametrize("priority", [0, 1])
def test_request_of_high_priority_waits_for_none_of_lower_priority(world, priority):
    settings = SimSettings(policy="priority", num_blocks=96)
    prompt = make_tokens(6 * CHUNK)
    with world.engines(settings) as (engine,):
        engine.scheduler.scheduler_config.long_prefill_token_threshold = CHUNK  # for each step of a prompt
        world.store_gate.shut()  # otherwise the second request may load the first chunks
        low = engine.add(prompt, priority=1)
        engine.step()
        high = engine.add(prompt, priority=priority)
        is_held = True
        while engine.results[low].finish_reason is None:
            engine.step()
            is_held = is_held and engine.scheduler.requests[high] not in engine.scheduler.running
        assert is_held is (priority == 1), "requests of equal priority compute a prompt once"
        world.store_gate.open()
        assert_idle(engine)
        assert engine.results[high].tokens == answer(prompt, 1)


FULL_MEMORY = {
    # vLLM 0.29 and 0.30 would start both loads, whose blocks leave one of the four that the next steps need.
    "two prompts": (3, 3, 242, 2, 3870, 3840),
    # vLLM 0.31 and later reserve two blocks of 128 for drafts, and would never start a load of 127 blocks.
    "long prompt": (40, 0, 129, 1, 4095, 4032),
}
"""Drafts, slots in which a model writes drafts, blocks, prompts, their tokens, and tokens that are loaded."""


@pytest.mark.parametrize("case", FULL_MEMORY)
def test_loads_that_fill_the_engines_memory_leave_blocks_for_drafts(world, monkeypatch, case):
    num_drafts, num_lookahead, num_blocks, num_prompts, num_tokens, num_loaded = FULL_MEMORY[case]
    monkeypatch.setattr(VllmConfig, "num_lookahead_tokens", num_lookahead)
    monkeypatch.setitem(CONNECTOR, "chunk_tokens", 32)
    settings = SimSettings(
        num_drafts=num_drafts, num_blocks=num_blocks, max_num_batched_tokens=2048, max_model_len=4096,
        head_size=2, groups=(SimGroup(block_tokens=32),),
    )  # fmt: skip
    prompts = [make_tokens(num_tokens) for _ in range(num_prompts)]
    with world.engines(settings) as (engine,):
        for prompt in prompts:
            engine.add(prompt)
            assert_idle(engine)
        names = [engine.add(prompt) for prompt in prompts]
        assert_idle(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.results[name].tokens == answer(prompt, 1)
            assert engine.results[name].num_cached_tokens == num_loaded
