"""vLLM's own KV events for routers: about blocks that enter and leave the sidecar's memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmcache_client.core import events
from testing.child_process import wait_until
from testing.deadlines import SIMULATED
from tests.harness.scope import examples
from tests.harness.sim.config import BLOCK, CHUNK, SimSettings
from tests.harness.sim.engine import SimEngine
from tests.harness.sim.world import (
    SimWorld,
    assert_idle,
    make_tokens,
    only_engine,
    serving_world,
    wait_attached,
    world,
)

DEADLINES = SIMULATED

__all__ = ["world"]

pytestmark = pytest.mark.vllm

WITH_EVENTS = SimSettings(has_events=True)


class Router:
    """A router that learns from an engine's events where blocks are cached."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.received: list[Any] = []
        self.in_memory: dict[Any, BlockStored] = {}
        self.num_removed = 0
        self.listen()

    def listen(self) -> list[Any]:
        """Take the events published since the last call. An engine without work publishes nothing."""
        run(self.engine, make_tokens(1))
        self.received += self.engine.published
        changes = [event for event in self.engine.published if getattr(event, "medium", None) == "CPU"]
        self.engine.published.clear()
        for event in changes:
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.in_memory[block_hash]
                    self.num_removed += 1
            else:
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size == CHUNK
                self.in_memory |= dict.fromkeys(event.block_hashes, event)
        return changes

    def learn(self, tokens: list[int], **fields: Any) -> None:
        """Run a prompt until the engine has reported all its full chunks."""

        def is_reported() -> bool:
            run(self.engine, tokens, **fields)
            self.listen()
            return self.num_tokens(tokens, **fields) == len(tokens) // CHUNK * CHUNK

        wait_until(is_reported, timeout=60, what="events of all chunks")

    def num_tokens(self, tokens: list[int], **fields: Any) -> int:
        """Number of leading tokens of a prompt that the router considers cached in memory."""
        name = self.engine.add(tokens, **fields)
        hashes = list(map(maybe_convert_block_hash, self.engine.scheduler.requests[name].block_hashes))
        self.engine.abort(name)
        self.engine.run()
        known = next((n for n, key in enumerate(hashes) if key not in self.in_memory), len(hashes))
        return known * BLOCK // CHUNK * CHUNK


def run(engine: SimEngine, tokens: list[int], **fields: Any) -> int:
    return engine.results[engine.serve(tokens, **fields)].num_cached_tokens


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("runner", [1, 2])
def test_store_events_equal_those_of_the_engines_own_blocks(
    world: SimWorld, runner: int, salt: str | None
) -> None:
    shape = SimSettings(runner=runner, has_events=True, has_prefix_caching=True)
    with world.engines(shape) as (engine,):
        router, tokens = Router(engine), make_tokens(3 * CHUNK + 5)
        router.learn(tokens, salt=salt)
        stores = [event for event in router.received if isinstance(event, BlockStored)]
        on_gpu, stored = ([event for event in stores if event.medium == medium] for medium in ("GPU", "CPU"))
        stored = [event for event in stored if event in router.in_memory.values()][-3:]
        assert [(e.medium, e.group_idx, e.block_size) for e in stored] == [("CPU", 0, BLOCK)] * 3

        def by_block(events_of_medium: list[BlockStored]) -> list[Any]:
            entries = []
            for event in events_of_medium:
                parent, keys = event.parent_block_hash, event.extra_keys or [None] * len(event.block_hashes)
                for number, (block_hash, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    part = tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK])
                    entries.append((block_hash, parent, part, key))
                    parent = block_hash
            return entries

        blocks = by_block(stored)
        start = by_block(on_gpu).index(blocks[0])
        assert blocks == by_block(on_gpu)[start : start + 3 * CHUNK // BLOCK]


def test_hit_on_chunks_of_another_engine_is_reported_once(world: SimWorld) -> None:
    with world.engines(SimSettings(), WITH_EVENTS) as (first, second):
        router, tokens = Router(second), make_tokens(2 * CHUNK + 5)
        wait_until(lambda: run(first, tokens) == 2 * CHUNK, what="a hit")
        router.listen()
        assert router.num_tokens(tokens) == 0
        wait_until(lambda: run(second, tokens) == 2 * CHUNK, what="a hit on the other engine's chunks")
        assert len(router.listen()) == 2
        assert router.num_tokens(tokens) == 2 * CHUNK
        run(second, tokens)
        assert router.listen() == []


def test_nothing_is_reported_unless_the_engine_enables_events(world: SimWorld) -> None:
    with world.engines(SimSettings()) as (engine,):
        run(engine, make_tokens(CHUNK + 1))
        run(engine, make_tokens(1))
        assert engine.published == []


def test_reset_reports_all_blocks_as_removed(world: SimWorld) -> None:
    with world.engines(WITH_EVENTS) as (engine,):
        router, tokens = Router(engine), make_tokens(2 * CHUNK + 5)
        router.learn(tokens)
        assert engine.reset(b"new")
        router.listen()
        assert router.in_memory == {}


def test_blocks_of_a_killed_sidecar_are_removed_and_reported_again() -> None:
    with only_engine(WITH_EVENTS) as (sidecar, engine):
        router, tokens = Router(engine), make_tokens(2 * CHUNK + 5)
        router.learn(tokens)
        sidecar.kill()
        wait_until(lambda: router.listen() and not router.in_memory, what="removal events of all blocks")
        sidecar.start()
        wait_attached(engine)
        router.learn(tokens)


def test_router_that_starts_later_learns_all_chunks(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.engines(WITH_EVENTS) as (engine,):
        first, tokens = Router(engine), make_tokens(3 * CHUNK + 5)
        first.learn(tokens)
        late = Router(engine)
        assert late.num_tokens(tokens) == 0
        monkeypatch.setattr(events, "REPEAT_SECONDS", 0.0)
        late.listen()
        assert late.num_tokens(tokens) == 3 * CHUNK


@pytest.fixture(scope="module")
def narrow():
    """A sidecar with memory for a few dozen chunks."""
    with serving_world(memory_size="1Mi") as world:
        yield world


@settings(max_examples=examples(10))
@given(requests=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=30, max_size=60))
def test_router_state_equals_the_index_despite_evictions(narrow: SimWorld, requests: list[Any]) -> None:
    with narrow.engines(WITH_EVENTS, SimSettings()) as (engine, silent):
        router, prompts = Router(engine), [make_tokens(4 * CHUNK + 5) for _ in range(10)]
        for number, num_chunks in requests:
            run(engine if number % 3 else silent, prompts[number][: num_chunks * CHUNK + 5])
            router.listen()
        for _ in range(2 + len(router.in_memory) // events.CHECKED_PER_STEP):
            router.listen()
        index = engine.scheduler.connector._scheduler._lookups.index
        reported = engine.scheduler.connector._scheduler._events._reported
        is_resident = [present for _, present in events._look_up(index, list(reported))]
        assert all(is_resident), "chunks are reported that are not in memory"
        num_rows = narrow.sidecar.stats()["memory"]["usable_rows"]
        assert router.num_removed or len(reported) < num_rows, (
            "nothing was evicted, or evictions are not reported"
        )
        hashes = {key for report in reported.values() for key in report.description.block_hashes}
        assert hashes == set(router.in_memory)
        assert_idle(engine)
        assert_idle(silent)
