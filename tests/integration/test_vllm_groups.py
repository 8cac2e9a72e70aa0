"""KV groups of every kind: loaded KV equals computed KV when blocks slide out, loads fail or copies are late.

vLLM's scheduler, block pools and runner hooks are real, and so are the connector and the sidecar. The model
is simulated (``tests/harness/sim/engine.py``), and everything that its layers would read is compared.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_client.core.copier import CpuCopier
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.common.timing import TIMING
from testing.deadlines import SIMULATED
from tests.harness.client.fake_model import answer
from tests.harness.scope import examples
from tests.harness.sim.config import CHUNK, SimGroup, SimSettings
from tests.harness.sim.scenario import Scenario, events
from tests.harness.sim.world import assert_idle, make_tokens, serving_world

DEADLINES = SIMULATED

pytestmark = pytest.mark.vllm

KINDS = {
    "mla": (SimGroup("mla"),),
    "window": (SimGroup("window", 50),),
    "full and windows": (SimGroup(), SimGroup("window", 50), SimGroup("window", 50, num_layers=1)),
    "wide windows": (SimGroup("window", 2 * CHUNK + 5), SimGroup()),
    "unlike blocks": (SimGroup("window", 34), SimGroup(block_tokens=32)),
    "chunked": (SimGroup("chunked", CHUNK), SimGroup()),
    "wide chunked": (SimGroup("chunked", 2 * CHUNK), SimGroup()),
    "states": (SimGroup("state", block_tokens=32), SimGroup(block_tokens=32)),
    "states and latents": (SimGroup("state"), SimGroup("state"), SimGroup("mla")),
}
MANY = 5 * CHUNK


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def world(request):
    settings = SimSettings(
        groups=request.param,
        head_size=16,  # several pages per chunk, and fewer for a window's tail
        num_blocks=64 * len(request.param),
        max_num_batched_tokens=CHUNK,  # a state is stored where a step ends
    )
    with serving_world(replace(settings, has_prefix_caching=settings.has_states)) as world:
        yield world


@pytest.fixture
def patient(monkeypatch):
    """No store is abandoned."""
    monkeypatch.setattr(TIMING, "left_behind_seconds", 60.0)
    monkeypatch.setattr(TIMING, "hold_seconds", 60.0)


@pytest.mark.parametrize(
    ("runner", "is_async"), [(1, False), (2, True)], ids=["runner1-sync", "runner2-async"]
)
@pytest.mark.usefixtures("patient")
def test_loaded_kv_equals_computed_kv(world, runner, is_async):
    prompt = make_tokens(MANY + 10)
    with world.engines(replace(world.settings, runner=runner, is_async=is_async)) as (engine,):
        for num_cached in (0, MANY):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)


@pytest.mark.usefixtures("patient")
def test_hit_copies_only_blocks_that_the_model_reads(world, monkeypatch):
    """The number of copied blocks does not depend on the length of the prompt."""
    prompt = make_tokens(MANY + 1)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        num_blocks, load = Counter(), CpuCopier.load

        def count(copier, rows, fence):
            for row in rows:
                num_blocks[row.group] += len(row.blocks)
            load(copier, rows, fence)

        monkeypatch.setattr(CpuCopier, "load", count)
        name = engine.add(prompt)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == MANY
    for number, group in enumerate(world.settings.groups):
        num_read = MANY - group.read_from(MANY)
        num_moved = num_blocks[number] * group.block_tokens
        assert num_read <= num_moved < num_read + group.block_tokens, group.kind


@pytest.mark.rotating
@pytest.mark.usefixtures("patient")
def test_load_continues_a_hit_in_the_engines_own_cache(world):
    prompt = make_tokens(MANY + 10)
    settings = replace(world.settings, has_prefix_caching=True)
    with world.engines(settings, settings) as (first, second):
        first.add(prompt)
        assert_idle(first)
        for num_tokens in (2 * CHUNK + 1, len(prompt)):
            name = second.add(prompt[:num_tokens], max_tokens=5)
            second.run()
            assert second.results[name].num_cached_tokens == num_tokens // CHUNK * CHUNK
        assert_idle(second)


@pytest.mark.parametrize("num_blocks", [40, 100])
def test_late_copies_of_reused_blocks_are_not_committed(world, num_blocks):
    """A block that slid out of a window is the first to be reused, however many are free."""
    settings = replace(world.settings, num_blocks=num_blocks * len(world.settings.groups))
    prompts = [make_tokens(3 * CHUNK) for _ in range(4)]
    with world.engines(settings) as (engine,):
        world.store_gate.shut()
        names = [engine.add(prompt, max_tokens=3 * CHUNK) for prompt in prompts]
        while not all(engine.results[name].tokens for name in names):
            engine.step()
        world.store_gate.open()
        assert_idle(engine)
    token_lists = [prompt + engine.results[name].tokens for name, prompt in zip(names, prompts, strict=True)]
    world.audit(settings, [each[: end + 1] for each in token_lists for end in range(CHUNK, len(each), CHUNK)])


@pytest.mark.rotating
@pytest.mark.usefixtures("patient")
def test_failed_load_is_computed(world, monkeypatch):
    prompt = make_tokens(MANY + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        with monkeypatch.context() as patch:
            patch.setattr(SidecarSession, "holds", lambda *_: False)
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 0
        assert engine.results[name].tokens == answer(prompt, 20)
        name = engine.add(prompt, max_tokens=20)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == MANY


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # other threads use it
@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(data=st.data(), steps=st.lists(events, min_size=10, max_size=40))
def test_tokens_are_right_for_any_order_of_events(world, data, steps):
    has_states = world.settings.has_states
    shapes = st.builds(
        replace,
        st.just(world.settings),
        runner=st.sampled_from((1, 2)),
        num_blocks=st.sampled_from((26, 32, 80)).map(lambda blocks: blocks * len(world.settings.groups)),
        has_prefix_caching=st.just(True) if has_states else st.booleans(),
        is_async=st.booleans(),
        max_num_seqs=st.sampled_from((2, 4)),
        max_num_batched_tokens=st.sampled_from((64, 160)),
        retention=st.sampled_from((0, None)),
        layout=st.sampled_from(("LBNHC", "BLNHC")),
        steps_together=st.booleans(),
    )
    first, second = data.draw(shapes), data.draw(shapes)
    num_drafts = 0 if has_states else data.draw(st.sampled_from((0, 3)))
    first, second = (replace(shape, num_drafts=num_drafts) for shape in (first, second))
    with world.engines(first, second) as engines:
        Scenario(world, engines).play(steps)


BLOCKED_BY_LOADS = [
    *[("arrive", 0, 0, 0, 1, 1, 1)] * 2,
    ("arrive", 1, 1, 0, 1, 66, 1),
    ("arrive", 0, 1, 61, 1, 1, 1),
    *[("reset", engine) for engine in (0, 1, 0)],
    ("abort", 0, 2),
    ("arrive", 1, 0, 192, 64, 104, 3),
    ("gate", "store_gate", "open"),
    ("reset", 0),
    ("step", 0, 6),
    ("drafts", 1, 0),
    ("step", 0, 8),
]
"""Two loads get all blocks but five, and both requests need six more. vLLM cannot preempt either."""


@settings(max_examples=examples(1), suppress_health_check=list(HealthCheck))
@given(st.just(BLOCKED_BY_LOADS))
def test_loads_leave_enough_blocks_to_continue(steps):
    groups = KINDS["wide windows"]
    small = SimSettings(num_blocks=52, max_num_seqs=2, max_num_batched_tokens=64, head_size=16, groups=groups)
    large = replace(small, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=160, layout="BLNHC")
    with serving_world(large) as pair, pair.engines(small, large) as engines:
        Scenario(pair, engines).play(steps)
