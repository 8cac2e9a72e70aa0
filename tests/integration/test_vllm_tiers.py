"""A real engine with a lower tier below its sidecar's memory, and faults of that tier."""

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.client import real_engine
from tests.harness.client.real_engine import (
    CHUNK,
    assert_loaded,
    attached_engine,
    restart_with_empty_arena,
    wait_hit,
)
from tests.harness.tiers.remote_objects import damage_row

pytestmark = [pytest.mark.vllm, pytest.mark.redis]

NUM_CHUNKS = 4


@pytest.fixture(scope="module")
def sidecar(shared_redis):
    with SidecarProcess(remote_url=shared_redis.unix_url, remote_timeout_seconds=60) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    with attached_engine(sidecar, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def make_prompt(seed):
    return real_engine.make_prompt(NUM_CHUNKS * CHUNK + 52, seed)


def compute(engine, sidecar, prompt):
    """Run a new prompt, and wait until its chunks are in Redis."""
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])  # those of other prompts
    num_written_before = sidecar.stats()["remote"]["written"]
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= num_written_before + NUM_CHUNKS)
    return computed


def assert_hit(engine, prompt, computed, num_loaded=NUM_CHUNKS * CHUNK):
    """Overwrite the engine's KV first, so that only a load can restore the right bytes."""
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert_loaded(hit, computed, num_loaded)
    assert hit.tokens == computed.tokens


@pytest.mark.parametrize("damage", ["flipped", "foreign"])
def test_damaged_value_is_computed_again(engine, sidecar, shared_redis, damage):
    prompt = make_prompt(damage)
    known_names = set(shared_redis.client.keys())
    computed = compute(engine, sidecar, prompt)
    for name in set(shared_redis.client.keys()) - known_names:
        damage_row(shared_redis.client, name, damage)
    restart_with_empty_arena(engine, sidecar)
    assert_hit(engine, prompt, computed, num_loaded=0)
    # The probe already detects a value of another type, and does not report the row as found.
    assert (sum(sidecar.stats()["remote"]["invalid"].values()) > 0) == (damage == "flipped")


def test_failing_redis_does_not_change_answers(tmp_path):
    """The engine and the sidecar have the usual deadlines: a frozen Redis must not hold up an answer."""
    with (
        RedisProcess() as redis,
        SidecarProcess(remote_url=redis.unix_url) as sidecar,
        EngineProcess(tmp_path / "log", connector_config(sidecar.socket_path)) as engine,
    ):
        wait_hit(engine.wait_ready(), sidecar)
        for fault in ("kill", "freeze"):
            known, unknown = make_prompt(f"{fault} known"), make_prompt(f"{fault} unknown")
            computed = compute(engine, sidecar, known)
            engine.start_generate(unknown)
            getattr(redis, fault)()
            (first,) = engine.finish_generate()
            assert first.finish_reason == "length"
            wait_full_hit(engine, known, computed)
            wait_full_hit(engine, unknown, first)
            redis.start() if fault == "kill" else redis.thaw()
            sidecar.wait_until(lambda stats: stats["remote"]["is_reachable"])
            prompt = make_prompt(f"{fault} after")
            computed = compute(engine, sidecar, prompt)
            restart_with_empty_arena(engine, sidecar)
            wait_full_hit(engine, prompt, computed)
            assert sidecar.stats()["remote"]["promoted"] >= NUM_CHUNKS


def wait_full_hit(engine, prompt, computed):
    """Repeat a prompt until all its rows are loaded. A request waits no longer than computing takes."""

    def is_full_hit():
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)
        assert hit.tokens == computed.tokens
        return hit if hit.num_cached_tokens == NUM_CHUNKS * CHUNK else None

    assert_loaded(wait_until(is_full_hit, what="a hit"), computed, NUM_CHUNKS * CHUNK)
