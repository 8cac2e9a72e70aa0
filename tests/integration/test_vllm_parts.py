"""Engines whose ranks span several nodes: each part has a sidecar, and a hit is what all parts have.

vLLM's scheduler and runner hooks are real, and so are the connector and the sidecars. Messages cross
processes by pickle. The scheduler side's clock passes in steps only (``tests/harness/sim/parts.py``).
"""

from dataclasses import replace

import pytest
import vllm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.child_process import wait_until
from testing.deadlines import SIMULATED
from tests.harness.client.fake_model import answer
from tests.harness.scope import examples
from tests.harness.sim.config import CHUNK, SimGroup, SimSettings
from tests.harness.sim.parted_scenario import PartedScenario, events
from tests.harness.sim.parts import MAX_WAIT_SECONDS
from tests.harness.sim.world import assert_idle, make_tokens, serving_world, wait_attached

DEADLINES = SIMULATED

pytestmark = pytest.mark.vllm

SHAPES = {
    "tensor": SimSettings(tensor_parallel=2, num_parts=2),
    "three parts": SimSettings(tensor_parallel=3, num_parts=3),
    "pipeline": SimSettings(pipeline_parallel=2, num_parts=2),
    "latents": SimSettings(groups=(SimGroup("mla"),), tensor_parallel=2, num_kv_heads=1, num_parts=2),
    "more latents": SimSettings(groups=(SimGroup("mla"),), tensor_parallel=4, num_kv_heads=1, num_parts=2),
    "fewer heads": SimSettings(tensor_parallel=4, num_kv_heads=2, num_parts=2),
    "stages of ranks": SimSettings(tensor_parallel=2, pipeline_parallel=2, num_parts=2),
    "windows": SimSettings(
        groups=(SimGroup(), SimGroup("window", 50)), tensor_parallel=2, num_parts=2, num_blocks=128
    ),
    "states": SimSettings(
        groups=(SimGroup("state", block_tokens=32), SimGroup(block_tokens=32)),
        head_size=16,
        num_blocks=128,
        max_num_batched_tokens=CHUNK,  # a state is stored where a step ends
        has_prefix_caching=True,
        tensor_parallel=2,
        num_parts=2,
    ),
}
if vllm.__version__.startswith("0.29."):  # it can't restart a request whose load failed
    del SHAPES["windows"], SHAPES["states"]


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def world(request):
    with serving_world(request.param) as world:
        yield world


@pytest.mark.parametrize("runner", [1, 2])
def test_loaded_kv_equals_computed_kv(world, runner):
    """Another engine does not know which rows the parts have, and waits for their answers in one step."""
    prompt = make_tokens(5 * CHUNK + 10)
    settings = replace(world.settings, runner=runner)
    with world.engines(settings, settings) as (first, second):
        for engine, num_cached in ((first, 0), (first, 5 * CHUNK), (second, 5 * CHUNK)):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            engine.forget()
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)
            assert not engine.leftovers()
        assert second.waits.waited[name] == (0.0, 0)


def test_loads_of_rows_that_a_part_lost_are_not_repeated():
    """An engine that knows the rows tries one load. An engine that asks first tries none."""
    prompt, new_prompt = make_tokens(3 * CHUNK + 5), make_tokens(3 * CHUNK + 5)
    settings = SHAPES["tensor"]
    with serving_world(settings) as world, world.engines(settings, settings) as (first, second):
        first.serve(prompt)
        world.sidecars[1].kill()
        clients = [engine.ranks[1].worker._worker._client for engine in (first, second)]
        wait_until(lambda: not any(client.session for client in clients), what="the part is detached")
        for engine, tokens, num_loads in ((first, prompt, 1), (second, prompt, 0), (first, new_prompt, 0)):
            num_before = engine.waits.num_loads
            for _ in range(3):
                assert engine.results[engine.serve(tokens)].num_cached_tokens == 0
            assert engine.waits.num_loads - num_before == num_loads
        world.sidecars[1].start()
        wait_attached(first)
        first.serve(prompt)
        assert first.results[first.serve(prompt)].num_cached_tokens == 3 * CHUNK


def test_only_one_request_waits_for_a_part_that_does_not_answer():
    prompts = [make_tokens(3 * CHUNK + 5) for _ in range(4)]
    settings = SHAPES["tensor"]
    with serving_world(settings) as world, world.engines(settings, settings) as (first, second):
        for prompt in prompts:
            first.serve(prompt)
        link, waited = second.links[1], second.waits.waited
        link.is_silent = True
        names = [second.serve(prompt) for prompt in prompts[:2]]
        assert 0 < waited[names[0]][0] <= MAX_WAIT_SECONDS
        assert names[1] not in waited
        link.is_silent = False
        names += [second.serve(prompt) for prompt in prompts[2:]]
        assert [second.results[name].num_cached_tokens for name in names] == [0, 0, 0, 3 * CHUNK]


_variants = st.fixed_dictionaries(
    {
        "runner": st.sampled_from((1, 2)),
        "is_async": st.booleans(),
        "max_late_outputs": st.sampled_from((0, 1, 2)),
        "max_num_seqs": st.sampled_from((2, 4)),
    }
)


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # other threads use it
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    is_short_of_blocks=st.booleans(),
    first=_variants,
    second=_variants,
    steps=st.lists(events, min_size=10, max_size=40),
)
def test_tokens_are_right_although_parts_fail(shape, is_short_of_blocks, first, second, steps):
    engine = SHAPES[shape]
    if is_short_of_blocks:
        engine = replace(engine, num_blocks=engine.num_blocks // 64 * 32)
    with (
        serving_world(engine, memory_size="2Mi") as world,
        world.engines(replace(engine, **first), replace(engine, **second)) as engines,
    ):
        PartedScenario(world, engines).play(steps)
