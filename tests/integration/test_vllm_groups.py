"""KV groups of every kind: what a hit brings is what was computed, whatever slides out, fails or comes late.

vLLM's scheduler, block pools and runner hooks are the real ones, so are the connector and the sidecar; the
model is not (``tests/harness/sim_engine.py``), and all that its layers would read is compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.engines.core import worker
from lmcache.engines.core.copier import CpuCopier
from lmcache.rpc.session import Session
from testing.processes import SidecarProcess
from tests.harness.fake_model import answer
from tests.harness.sim_config import CHUNK, SimGroup, SimSettings
from tests.harness.sim_engine import SimEngine
from tests.harness.sim_scenario import Scenario, events
from tests.harness.sim_world import SimWorld, assert_idle, make_tokens

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


def stores_only_full(groups):
    """Does a request keep all KV of which something is stored?"""
    return all(
        group.kind in ("full", "mla") or (group.kind == "chunked" and group.span == CHUNK) for group in groups
    )


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def world(request):
    settings = SimSettings(
        groups=request.param,
        head_size=16,  # several pages per chunk, and fewer of a window's tail
        num_blocks=64 * len(request.param),
        max_num_batched_tokens=CHUNK,  # a state is kept where a step ends
    )
    with SidecarProcess(memory_size="64Mi") as sidecar:
        world = SimWorld(sidecar, replace(settings, has_prefix_caching=settings.has_states))
        yield world
        world.close()


@pytest.fixture
def patient(monkeypatch):
    """No store is given up."""
    monkeypatch.setattr(worker, "LEFT_BEHIND_SECONDS", 60.0)
    monkeypatch.setattr(worker, "HOLD_SECONDS", 60.0)


@pytest.mark.parametrize(
    ("runner", "is_async"), [(1, False), (2, True)], ids=["runner1-sync", "runner2-async"]
)
@pytest.mark.usefixtures("patient")
def test_a_hit_is_what_was_computed(world, runner, is_async):
    prompt = make_tokens(MANY + 10)
    with world.engines(replace(world.settings, runner=runner, is_async=is_async)) as (engine,):
        for num_cached in (0, MANY):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)


@pytest.mark.usefixtures("patient")
def test_a_hit_moves_no_more_than_the_model_will_read_and_a_chunk(world, monkeypatch):
    """However long the prompt is."""
    prompt = make_tokens(MANY + 1)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        num_blocks, load = Counter(), CpuCopier.load

        def count(copier, group, slot, first_block, blocks, fence):
            num_blocks[group] += len(blocks)
            load(copier, group, slot, first_block, blocks, fence)

        monkeypatch.setattr(CpuCopier, "load", count)
        name = engine.add(prompt)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == MANY
    for number, group in enumerate(world.settings.groups):
        num_read = MANY - group.read_from(MANY)
        moved = num_blocks[number] * group.block_tokens
        assert num_read <= moved < num_read + group.block_tokens, group.kind


@pytest.mark.usefixtures("patient")
def test_a_prefix_that_others_share(world):
    """vLLM's own cache keeps of windows and states what the same prompt needs, and nothing for others."""
    prompt = make_tokens(MANY)
    with world.engines(replace(world.settings, has_prefix_caching=True)) as (engine,):
        alone = SimEngine("/nowhere", engine.settings)
        shared = prompt[: 3 * CHUNK + 7] + make_tokens(CHUNK)
        for has_others in (False, True):
            names = {}
            for of in (alone, engine):
                names[of] = of.add(shared if has_others else prompt, max_tokens=3)
                of.run()
        assert engine.results[names[engine]].num_cached_tokens == 3 * CHUNK
        if any(group.kind == "window" for group in world.settings.groups):
            assert alone.results[names[alone]].num_cached_tokens == 0
        assert not engine.wrong_reads
        assert not alone.wrong_reads
        alone.close()


@pytest.mark.usefixtures("patient")
def test_a_hit_behind_what_the_engine_has_itself(world):
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


@pytest.mark.usefixtures("patient")
def test_the_answer_is_the_next_turn_s_prompt(world):
    prompt = make_tokens(2 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        name = engine.add(prompt, max_tokens=2 * CHUNK)
        assert_idle(engine)
        turn = prompt + engine.results[name].tokens + make_tokens(5)
        name = engine.add(turn, max_tokens=3)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 4 * CHUNK
        assert engine.results[name].tokens == answer(turn, 3)


def slide_under_copies(world, engine):
    """Blocks are given to others while copies of them wait; the requests' tokens."""
    prompts = [make_tokens(3 * CHUNK) for _ in range(4)]
    world.store_gate.shut()
    names = [engine.add(prompt, max_tokens=3 * CHUNK) for prompt in prompts]
    while not all(engine.results[name].tokens for name in names):
        engine.step()
    world.store_gate.open()
    engine.run()
    spoken = [prompt + engine.results[name].tokens for name, prompt in zip(names, prompts, strict=True)]
    return [tokens[: end + 1] for tokens in spoken for end in range(CHUNK, len(tokens), CHUNK)]


@pytest.mark.parametrize("num_blocks", [40, 100])
def test_late_copies_of_blocks_that_others_have_are_not_committed(world, num_blocks):
    """A block that slid out is the first to be given away, however many are free."""
    settings = replace(world.settings, num_blocks=num_blocks * len(world.settings.groups))
    with world.engines(settings) as (engine,):
        spoken = slide_under_copies(world, engine)
        assert_idle(engine)
    world.audit(settings, spoken)


def test_a_connector_that_is_not_told_of_blocks_that_others_get(world, monkeypatch):
    if stores_only_full(world.settings.groups):
        pytest.skip("nothing slides out that is stored")
    with world.engines(world.settings) as (engine,):
        monkeypatch.setattr(engine.worker, "handle_preemptions", lambda meta: None)
        spoken = slide_under_copies(world, engine)
    with pytest.raises(AssertionError, match="committed under a wrong name"):
        world.audit(world.settings, spoken)


@pytest.mark.usefixtures("patient")
def test_a_failed_load_is_computed(world, monkeypatch):
    prompt = make_tokens(MANY + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "holds", lambda *_: False)
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 0
        assert engine.results[name].tokens == answer(prompt, 20)
        name = engine.add(prompt, max_tokens=20)
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == MANY


@pytest.mark.usefixtures("patient")
def test_a_load_without_the_first_block_of_a_group_is_seen(world, monkeypatch):
    prompt = make_tokens(MANY + 1)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        loaded, load = set(), CpuCopier.load
        for number in range(len(world.settings.groups)):

            def leave_out_the_first(copier, group, slot, first_block, blocks, fence, number=number):
                left_out = group == number and number not in loaded
                if group == number:
                    loaded.add(group)
                if left_out < len(blocks):
                    load(copier, group, slot, first_block + left_out, blocks[left_out:], fence)

            monkeypatch.setattr(CpuCopier, "load", leave_out_the_first)
            engine.add(prompt)
            engine.run()
            engine.forget()
            wrong, engine.wrong_reads = engine.wrong_reads, []
            assert bool(wrong) is (number in loaded), number
        assert loaded


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # other threads do
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data(), happens=st.lists(events, min_size=10, max_size=40))
def test_any_order_of_events(world, data, happens):
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
    )
    shape, other = data.draw(shapes), data.draw(shapes)
    num_drafts = 0 if has_states else data.draw(st.sampled_from((0, 3)))
    shape, other = (replace(of, num_drafts=num_drafts) for of in (shape, other))
    with world.engines(shape, other) as engines:
        Scenario(world, engines).play(happens)
