"""What a real engine gets from the tiers below its sidecar's memory, and what their faults cost it."""

from __future__ import annotations

import random

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.remote_objects import damage_row
from tests.harness.samples import Watch

pytestmark = [pytest.mark.vllm, pytest.mark.redis]

BLOCK, CHUNK = 32, 256
NUM_TOKENS, NUM_CHUNKS = 2100, 8
ANSWER_SECONDS = 30.0
"""Seconds until an unanswered request is computed: a busy machine must not turn hits into misses."""


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(redis):
    with SidecarProcess(memory_size="256Mi", remote_url=redis.unix_url) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    config = connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS)
    with EngineProcess(tmp_path_factory.mktemp("engine") / "log", config) as engine:
        engine.wait_ready()
        wait_attached(engine, sidecar)
        yield engine


def make_prompt(seed):
    tokens = random.Random(seed)
    return [tokens.randrange(4, 260) for _ in range(NUM_TOKENS)]


def wait_attached(engine, sidecar):
    """Until the engine's lookups arrive: it learns that it is attached a moment after the sidecar does."""
    sidecar.wait_until(lambda stats: [client["is_attached"] for client in stats["clients"]].count(True) >= 2)
    sidecar.wait_until(lambda stats: stats["memory"]["usable_rows"] >= 4 * NUM_CHUNKS)
    seen = sidecar.stats()["memory"]["misses"]

    def asks() -> bool:
        engine.generate(make_prompt(random.random())[: CHUNK + BLOCK])
        return sidecar.stats()["memory"]["misses"] > seen

    wait_until(asks)
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)


def compute(engine, sidecar, prompt):
    """Run a prompt that nobody has seen; returns when its chunks are in Redis."""
    before = sidecar.stats()["remote"]["written"]
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= before + NUM_CHUNKS)
    return computed


def forget_memory(engine, sidecar):
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    wait_attached(engine, sidecar)


def assert_comes_back(engine, sidecar, prompt, computed):
    """Only Redis has the rows. A request waits for them no longer than computing them takes, so the first one
    may not get all; what it began is finished."""
    before = sidecar.stats()["remote"]["promoted"]
    assert engine.generate(prompt)[0].tokens == computed.tokens
    sidecar.wait_until(lambda stats: stats["remote"]["promoted"] == before + NUM_CHUNKS)
    assert_hit(engine, prompt, computed)


def assert_hit(engine, prompt, computed, num_loaded=NUM_CHUNKS * CHUNK):
    """The engine's KV is overwritten first, so that only a load can bring the right bytes."""
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert hit.num_cached_tokens == num_loaded
    assert hit.tokens == computed.tokens
    end = num_loaded // BLOCK
    for layer, (found, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert found[:end] == expected[:end], f"layer {layer}"


def test_a_killed_sidecar_finds_its_rows_again(engine, sidecar, redis):
    prompt = make_prompt("killed")
    computed = compute(engine, sidecar, prompt)
    redis.client.flushall()  # what comes back can only come from the arena
    sidecar.restart()
    wait_attached(engine, sidecar)
    assert_hit(engine, prompt, computed)
    stats = sidecar.stats()
    assert (stats["memory"]["verified"], stats["remote"]["promoted"]) == (NUM_CHUNKS, 0)


def test_an_empty_arena_is_filled_from_redis(engine, sidecar):
    prompt = make_prompt("empty")
    computed = compute(engine, sidecar, prompt)
    forget_memory(engine, sidecar)
    assert_comes_back(engine, sidecar, prompt, computed)


def test_requests_are_told_with_where_their_chunks_were(engine, sidecar):
    prompt, told = make_prompt("told"), Watch(sidecar)
    computed = compute(engine, sidecar, prompt)
    assert_hit(engine, prompt, computed)
    cold, hit = told.next(2, NUM_CHUNKS)
    assert (cold.tiers, hit.tiers) == ("-" * NUM_CHUNKS, "m" * NUM_CHUNKS)
    assert cold.keys == hit.keys
    forget_memory(engine, sidecar)
    told = Watch(sidecar)
    assert_comes_back(engine, sidecar, prompt, computed)
    first, second = told.next(2, NUM_CHUNKS)
    assert first.keys == second.keys == cold.keys
    chunks = ["".join(letters) for letters in zip(first.tiers, second.tiers, strict=True)]
    assert set(chunks) <= {"rm", "-r"}, "what did not come at once was computed"
    lookups = sidecar.stats()["lookups"]
    assert lookups["hit_tokens"]["remote"] == NUM_CHUNKS * CHUNK
    assert (lookups["gpus"], lookups["chunk_tokens"]) == (1, CHUNK)
    assert lookups["engine_kv_bytes"] > lookups["row_bytes"] > 0


@pytest.mark.parametrize("damage", ["flipped", "foreign"])
def test_a_damaged_value_is_computed_again(engine, sidecar, redis, damage):
    prompt = make_prompt(damage)
    known = set(redis.client.keys())
    computed = compute(engine, sidecar, prompt)
    for name in set(redis.client.keys()) - known:
        damage_row(redis.client, name, damage)
    forget_memory(engine, sidecar)
    assert_hit(engine, prompt, computed, num_loaded=0)
    # A value of another type is found out by the probe already: it is not announced.
    assert (sum(sidecar.stats()["remote"]["invalid"].values()) > 0) == (damage == "flipped")


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_redis_that_fails_costs_nothing_but_its_hits(engine, sidecar, redis, fault):
    known, unknown = make_prompt(f"{fault} known"), make_prompt(f"{fault} unknown")
    computed = compute(engine, sidecar, known)
    engine.start_generate(unknown)
    getattr(redis, fault)()
    (first,) = engine.finish_generate()
    assert first.finish_reason == "length"
    assert_hit(engine, known, computed)
    assert_hit(engine, unknown, first)
    redis.start() if fault == "kill" else redis.thaw()
    sidecar.wait_until(lambda stats: stats["remote"]["is_reachable"])
    prompt = make_prompt(f"{fault} after")
    computed = compute(engine, sidecar, prompt)
    forget_memory(engine, sidecar)
    assert_comes_back(engine, sidecar, prompt, computed)
