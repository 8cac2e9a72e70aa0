"""A real engine with a lower tier below its sidecar's memory, and faults of that tier."""

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
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""


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
    """Wait until the engine's lookups arrive: it learns that it is attached a moment after the sidecar."""
    sidecar.wait_until(lambda stats: any(client["is_attached"] for client in stats["clients"]))
    sidecar.wait_until(lambda stats: stats["memory"]["usable_rows"] >= 4 * NUM_CHUNKS)
    num_misses = sidecar.stats()["memory"]["misses"]

    def has_asked() -> bool:
        engine.generate(make_prompt(random.random())[: CHUNK + BLOCK])
        return sidecar.stats()["memory"]["misses"] > num_misses

    wait_until(has_asked)
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)


def compute(engine, sidecar, prompt):
    """Run a new prompt, and wait until its chunks are in Redis."""
    num_written_before = sidecar.stats()["remote"]["written"]
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= num_written_before + NUM_CHUNKS)
    return computed


def restart_with_empty_arena(engine, sidecar):
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    wait_attached(engine, sidecar)


def assert_promoted(engine, sidecar, prompt, computed):
    """Check that a prompt whose rows are only in Redis is promoted and hits.

    A request waits no longer than computing takes, so the first request may not load all rows. The promotions
    that it started continue.
    """
    num_promoted_before = sidecar.stats()["remote"]["promoted"]
    assert engine.generate(prompt)[0].tokens == computed.tokens
    sidecar.wait_until(lambda stats: stats["remote"]["promoted"] == num_promoted_before + NUM_CHUNKS)
    assert_hit(engine, prompt, computed)


def assert_verified(engine, sidecar, prompt, computed):
    """Check that a prompt whose rows survived a restart of the sidecar in its arena hits.

    They are verified at their first use. As with promotions, the first request may be computed instead.
    """
    assert engine.generate(prompt)[0].tokens == computed.tokens
    sidecar.wait_until(lambda stats: stats["memory"]["verified"] == NUM_CHUNKS)
    assert_hit(engine, prompt, computed)


def assert_hit(engine, prompt, computed, num_loaded=NUM_CHUNKS * CHUNK):
    """Overwrite the engine's KV first, so that only a load can restore the right bytes."""
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert hit.num_cached_tokens == num_loaded
    assert hit.tokens == computed.tokens
    end = num_loaded // BLOCK
    for layer, (loaded, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert loaded[:end] == expected[:end], f"layer {layer}"


def test_restarted_sidecar_serves_its_rows_again(engine, sidecar, redis):
    prompt = make_prompt("killed")
    computed = compute(engine, sidecar, prompt)
    redis.client.flushall()  # so that rows can only be found in the arena
    sidecar.restart()
    wait_attached(engine, sidecar)
    assert_verified(engine, sidecar, prompt, computed)
    assert sidecar.stats()["remote"]["promoted"] == 0


def test_rows_are_promoted_from_redis_into_an_empty_arena(engine, sidecar):
    prompt = make_prompt("empty")
    computed = compute(engine, sidecar, prompt)
    restart_with_empty_arena(engine, sidecar)
    assert_promoted(engine, sidecar, prompt, computed)


def test_samples_show_the_tier_of_each_chunk(engine, sidecar):
    prompt, watcher = make_prompt("reported"), Watch(sidecar)
    computed = compute(engine, sidecar, prompt)
    assert_hit(engine, prompt, computed)
    cold, hit = watcher.next(2, NUM_CHUNKS)
    assert (cold.tiers, hit.tiers) == ("-" * NUM_CHUNKS, "m" * NUM_CHUNKS)
    assert cold.keys == hit.keys
    restart_with_empty_arena(engine, sidecar)
    watcher = Watch(sidecar)
    assert_promoted(engine, sidecar, prompt, computed)
    first, second = watcher.next(2, NUM_CHUNKS)
    assert first.keys == second.keys == cold.keys
    chunks = ["".join(letters) for letters in zip(first.tiers, second.tiers, strict=True)]
    assert set(chunks) <= {"rm", "-r"}, "chunks that are not promoted in time must be computed"
    lookups = sidecar.stats()["lookups"]
    assert lookups["hit_tokens"]["remote"] == NUM_CHUNKS * CHUNK
    assert (lookups["gpus"], lookups["chunk_tokens"]) == (1, CHUNK)
    assert lookups["engine_kv_bytes"] > lookups["row_bytes"] > 0


@pytest.mark.parametrize("damage", ["flipped", "foreign"])
def test_damaged_value_is_computed_again(engine, sidecar, redis, damage):
    prompt = make_prompt(damage)
    known_names = set(redis.client.keys())
    computed = compute(engine, sidecar, prompt)
    for name in set(redis.client.keys()) - known_names:
        damage_row(redis.client, name, damage)
    restart_with_empty_arena(engine, sidecar)
    assert_hit(engine, prompt, computed, num_loaded=0)
    # The probe already detects a value of another type, and does not report the row as found.
    assert (sum(sidecar.stats()["remote"]["invalid"].values()) > 0) == (damage == "flipped")


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_failing_redis_does_not_change_answers(engine, sidecar, redis, fault):
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
    restart_with_empty_arena(engine, sidecar)
    assert_promoted(engine, sidecar, prompt, computed)
