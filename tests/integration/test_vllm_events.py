"""What routers are told: vLLM's own KV events, of what comes into the sidecar's memory and what leaves it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmcache.engines.core import events
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.sim_config import BLOCK, CHUNK, SimSettings
from tests.harness.sim_engine import SimEngine
from tests.harness.sim_world import SimWorld, assert_idle, make_tokens, wait_attached, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

TOLD = SimSettings(has_events=True)


class Router:
    """Knows from an engine's events where its blocks are."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.heard: list[Any] = []
        self.in_memory: dict[Any, BlockStored] = {}
        self.num_removed = 0
        self.listen()

    def listen(self) -> list[Any]:
        """Take what was published since the last time; an engine that has nothing to do publishes nothing."""
        run(self.engine, make_tokens(1))
        self.heard += self.engine.published
        news = [event for event in self.engine.published if getattr(event, "medium", None) == "CPU"]
        self.engine.published.clear()
        for event in news:
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.in_memory[block_hash]
                    self.num_removed += 1
            else:
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size == CHUNK
                self.in_memory |= dict.fromkeys(event.block_hashes, event)
        return news

    def learn(self, tokens: list[int], **fields: Any) -> None:
        """Have the engine run a prompt until its full chunks are told of."""

        def is_told() -> bool:
            run(self.engine, tokens, **fields)
            self.listen()
            return self.num_tokens(tokens, **fields) == len(tokens) // CHUNK * CHUNK

        wait_until(is_told, timeout=60, what="events of all chunks")

    def num_tokens(self, tokens: list[int], **fields: Any) -> int:
        """Leading tokens of a prompt that it takes for cached in memory."""
        name = self.engine.add(tokens, **fields)
        hashes = list(map(maybe_convert_block_hash, self.engine.scheduler.requests[name].block_hashes))
        self.engine.abort(name)
        self.engine.run()
        known = next((n for n, each in enumerate(hashes) if each not in self.in_memory), len(hashes))
        return known * BLOCK // CHUNK * CHUNK


def run(engine: SimEngine, tokens: list[int], **fields: Any) -> int:
    name = engine.add(tokens, **fields)
    engine.run(name)
    engine.run()
    engine.forget()
    return engine.results[name].num_cached_tokens


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("runner", [1, 2])
def test_a_store_is_told_in_the_words_of_the_engine_s_own_blocks(
    world: SimWorld, runner: int, salt: str | None
) -> None:
    shape = SimSettings(runner=runner, has_events=True, has_prefix_caching=True)
    with world.engines(shape) as (engine,):
        router, tokens = Router(engine), make_tokens(3 * CHUNK + 5)
        router.learn(tokens, salt=salt)
        told = [event for event in router.heard if isinstance(event, BlockStored)]
        own, stored = ([event for event in told if event.medium == medium] for medium in ("GPU", "CPU"))
        stored = [event for event in stored if event in router.in_memory.values()][-3:]
        assert [(e.medium, e.group_idx, e.block_size) for e in stored] == [("CPU", 0, BLOCK)] * 3

        def by_block(told: list[BlockStored]) -> list[Any]:
            found = []
            for event in told:
                parent, keys = event.parent_block_hash, event.extra_keys or [None] * len(event.block_hashes)
                for number, (block_hash, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    part = tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK])
                    found.append((block_hash, parent, part, key))
                    parent = block_hash
            return found

        blocks = by_block(stored)
        start = by_block(own).index(blocks[0])
        assert blocks == by_block(own)[start : start + 3 * CHUNK // BLOCK]


def test_a_hit_of_what_another_engine_stored_is_told_once(world: SimWorld) -> None:
    with world.engines(SimSettings(), TOLD) as (first, second):
        router, tokens = Router(second), make_tokens(2 * CHUNK + 5)
        wait_until(lambda: run(first, tokens) == 2 * CHUNK, what="a hit")
        router.listen()
        assert router.num_tokens(tokens) == 0
        wait_until(lambda: run(second, tokens) == 2 * CHUNK, what="a hit of another engine's")
        assert len(router.listen()) == 2
        assert router.num_tokens(tokens) == 2 * CHUNK
        run(second, tokens)
        assert router.listen() == []


def test_without_the_engine_s_setting_nothing_is_told(world: SimWorld) -> None:
    with world.engines(SimSettings()) as (engine,):
        run(engine, make_tokens(CHUNK + 1))
        run(engine, make_tokens(1))
        assert engine.published == []


def test_after_a_reset_nothing_is_there(world: SimWorld) -> None:
    with world.engines(TOLD) as (engine,):
        router, tokens = Router(engine), make_tokens(2 * CHUNK + 5)
        router.learn(tokens)
        assert engine.reset(b"new")
        router.listen()
        assert router.in_memory == {}


def test_a_sidecar_that_ends_takes_all_with_it_and_gives_it_back() -> None:
    with SidecarProcess(memory_size="64Mi") as sidecar:
        world = SimWorld(sidecar)
        with world.engines(TOLD) as (engine,):
            router, tokens = Router(engine), make_tokens(2 * CHUNK + 5)
            router.learn(tokens)
            sidecar.kill()
            wait_until(lambda: router.listen() and not router.in_memory, what="the end of all that was told")
            sidecar.start()
            wait_attached(engine)
            router.learn(tokens)
        world.close()


@pytest.fixture(scope="module")
def narrow():
    """A sidecar with room for a few dozen chunks."""
    with SidecarProcess(memory_size="1Mi") as sidecar:
        world = SimWorld(sidecar)
        yield world
        world.close()


@settings(max_examples=10, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=30, max_size=60))
def test_a_router_knows_what_is_there_whatever_was_evicted(narrow: SimWorld, asked: list[Any]) -> None:
    with narrow.engines(TOLD, SimSettings()) as (engine, other):
        router, prompts = Router(engine), [make_tokens(4 * CHUNK + 5) for _ in range(10)]
        for number, num_chunks in asked:
            run(engine if number % 3 else other, prompts[number][: num_chunks * CHUNK + 5])
            router.listen()
        for _ in range(2 + len(router.in_memory) // events.CHECKED_PER_STEP):
            router.listen()
        index = engine.scheduler.connector._scheduler._lookups.index
        told = engine.scheduler.connector._scheduler._events._told
        assert all(there for _, there in events._look(index, list(told))), "told of, and not there"
        num_rows = narrow.sidecar.stats()["memory"]["usable_rows"]
        assert router.num_removed or len(told) < num_rows, "nothing was evicted, or nobody told of it"
        hashes = {maybe_convert_block_hash(each) for chunk in told.values() for each in chunk}
        assert hashes == set(router.in_memory)
        assert_idle(engine)
        assert_idle(other)
