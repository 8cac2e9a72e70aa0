"""What vLLM's scheduler makes of its requests is what the sidecar says of them, and where their KV was."""

from __future__ import annotations

import re
import threading
import time

import pytest

from testing.processes import RedisProcess, SidecarProcess
from tests.harness.samples import Watch
from tests.harness.sim_config import CHUNK, SimGroup, SimSettings
from tests.harness.sim_world import SimWorld, assert_idle, make_tokens, wait_attached

pytestmark = pytest.mark.vllm

CACHING = SimSettings(num_blocks=256, has_prefix_caching=True)

MEMORY_SIZE = "6Mi"
"""Few enough rows for all keys to be sampled."""


@pytest.fixture(scope="module")
def world():
    with SidecarProcess(memory_size=MEMORY_SIZE) as sidecar:
        world = SimWorld(sidecar)
        yield world
        world.close()


def watch(sidecar, *engines):
    """From now on: what is of before is told, which the scheduler does not wait for."""
    for engine in engines:
        wait_told(engine)
    return Watch(sidecar)


def wait_told(engine):
    done = threading.Event()
    engine.scheduler.connector._scheduler._lookups._queue.put(done.set)
    assert done.wait(60)


def run(engine, tokens, **fields):
    """One request alone."""
    name = engine.add(tokens, **fields)
    engine.run(name)
    engine.run()
    return engine.results[name]


def test_each_request_is_told_once_with_where_its_chunks_were(world):
    prompt = make_tokens(4 * CHUNK + 5)
    with world.engines(CACHING) as (engine,):
        told = watch(world.sidecar, engine)
        run(engine, prompt)
        run(engine, prompt)
        engine.forget()
        run(engine, prompt)
        run(engine, [*prompt[: 4 * CHUNK], *make_tokens(2 * CHUNK)])
        engine.forget()
        run(engine, [*prompt[: 2 * CHUNK], *make_tokens(CHUNK)])
        cold, engine_hit, memory_hit, longer, shared = requests = told.next(5)
    assert [one.tiers[::-1] for one in requests] == ["----", "eeee", "mmmm", "eeee--", "mm-"]
    assert cold.keys == engine_hit.keys == memory_hit.keys == longer.keys[-4:]
    assert shared.keys[-2:] == cold.keys[-2:]
    assert abs(requests[-1].time - time.time()) < 120


def test_the_whole_of_a_prompt_that_ends_with_a_chunk_is_a_hit(world):
    """One token is left to compute, whose chunk is nevertheless there."""
    prompt = make_tokens(3 * CHUNK)
    with world.engines(CACHING) as (engine,):
        told = watch(world.sidecar, engine)
        run(engine, prompt)
        run(engine, prompt)
        engine.forget()
        assert run(engine, prompt).num_cached_tokens > 2 * CHUNK
        assert told.tiers(3) == ["---", "eee", "mmm"]


def test_a_chunk_that_the_engine_has_in_part_is_memorys(world):
    """vLLM keeps blocks, of which a chunk has several."""
    prompt = make_tokens(2 * CHUNK + 5)
    with world.engines(CACHING) as (engine,):
        run(engine, prompt)
        engine.forget()
        told = watch(world.sidecar, engine)
        before = world.sidecar.stats()["lookups"]["loaded_tokens"].get("memory", 0)
        run(engine, prompt[: CHUNK + CHUNK // 2])
        run(engine, prompt)
        assert told.tiers(2) == ["m", "em"]
        loaded = world.sidecar.stats()["lookups"]["loaded_tokens"]["memory"] - before
        assert loaded == CHUNK + CHUNK // 2


def test_requests_that_queue_and_ask_again_are_told_once(world):
    prompts = [make_tokens(3 * CHUNK + 1) for _ in range(4)]
    with world.engines(SimSettings(num_blocks=40, max_num_seqs=1)) as (engine,):
        for prompt in prompts:
            run(engine, prompt)
        told = watch(world.sidecar, engine)
        world.load_gate.shut()
        names = [engine.add(prompt) for prompt in [*prompts, *prompts]]
        for _ in range(50):
            engine.step()
        world.load_gate.open()
        engine.run(*names)
        assert_idle(engine)
        requests = told.next(8)
    assert [one.tiers for one in requests] == ["mmm"] * 8
    assert sorted(one.keys for one in requests[:4]) == sorted(one.keys for one in requests[4:])


def test_a_request_that_is_preempted_and_resumed_is_told_again(world):
    with world.engines(SimSettings(num_blocks=21, max_num_seqs=2)) as (engine,):
        told = watch(world.sidecar, engine)
        first = engine.add(make_tokens(2 * CHUNK + 1), max_tokens=60)
        second = engine.add(make_tokens(2 * CHUNK + 1), max_tokens=60)
        engine.run(first, second)
        assert_idle(engine)
        wait_told(engine)
        first, second, *resumed = told.now()
    assert (first.tiers, second.tiers) == ("--", "--")
    assert resumed
    for one in resumed:  # what it had computed was stored, if the machine was quick enough
        assert one.keys[-2:] in (first.keys, second.keys)


def test_tenants_have_keys_of_their_own(world):
    prompt = make_tokens(2 * CHUNK + 1)
    with world.engines(SimSettings(num_blocks=64)) as (engine,):
        told = watch(world.sidecar, engine)
        for salt in ("one", "two", "one"):
            run(engine, prompt, salt=salt)
        one, two, again = told.next(3)
    assert (one.tiers, two.tiers, again.tiers) == ("--", "--", "mm")
    assert one.keys == again.keys
    assert not set(one.keys) & set(two.keys)


def test_new_weights_have_new_keys(world):
    prompt = make_tokens(2 * CHUNK + 1)
    with world.engines(CACHING) as (engine,):
        told = watch(world.sidecar, engine)
        run(engine, prompt)
        assert engine.reset(b"new weights")
        run(engine, prompt)
        engine.forget()
        run(engine, prompt)
        before, after, again = told.next(3)
    assert (before.tiers, after.tiers, again.tiers) == ("--", "--", "mm")
    assert after.keys == again.keys
    assert not set(before.keys) & set(after.keys)


def test_two_engines_are_told_of_together(world):
    prompts = [make_tokens(2 * CHUNK + 1) for _ in range(2)]
    with world.engines(CACHING, CACHING) as (first, second):
        before = world.sidecar.stats()["lookups"]
        told = watch(world.sidecar, first, second)
        run(first, prompts[0])
        run(second, prompts[0])
        run(second, prompts[1])
        run(first, prompts[1])
        assert told.tiers(4) == ["--", "mm", "--", "mm"]
        after = world.sidecar.stats()["lookups"]
        kv_bytes = sum(engine.ranks[0].pages.nbytes for engine in (first, second))
    assert after["gpus"] == 2
    assert after["engine_kv_bytes"] == kv_bytes
    for name, number in (("num_lookups", 4), ("lookup_tokens", 8 * CHUNK)):
        assert after[name] - before[name] == number
    for name in ("hit_tokens", "loaded_tokens"):
        assert after[name]["memory"] - before[name].get("memory", 0) == 4 * CHUNK
    assert after["miss_bytes"] - before["miss_bytes"] == 4 * after["row_bytes"]


def test_a_chunk_of_full_attention_and_windows_is_one_key(world):
    groups = (SimGroup(), SimGroup("window", span=24))
    prompt = make_tokens(4 * CHUNK + 1)
    with SidecarProcess(memory_size=MEMORY_SIZE) as sidecar:
        own = SimWorld(sidecar)
        with own.engines(SimSettings(num_blocks=256, groups=groups)) as (engine,):
            told = watch(sidecar, engine)
            run(engine, prompt)
            run(engine, prompt)
            requests = told.next(2)
            stats = sidecar.stats()
        own.close()
    assert [one.tiers for one in requests] == ["----", "mmmm"]
    lookups, geometry = stats["lookups"], stats["geometry"]
    assert lookups["row_bytes"] % geometry["slot_bytes"] == 0
    assert lookups["row_bytes"] >= lookups["kv_bytes_per_token"] * CHUNK


@pytest.mark.redis
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_what_a_lower_tier_brought_is_its_hit_once(tier, tmp_path):
    prompt = make_tokens(4 * CHUNK + 1)
    with RedisProcess() as redis:
        options = (
            {"disk_path": tmp_path, "disk_size": "64Mi"} if tier == "disk" else {"remote_url": redis.unix_url}
        )
        with SidecarProcess(memory_size=MEMORY_SIZE, **options) as sidecar:
            own = SimWorld(sidecar)
            with own.engines(SimSettings(num_blocks=64)) as (engine,):
                told = watch(sidecar, engine)
                run(engine, prompt)
                assert told.tiers(1) == ["----"]
                sidecar.wait_until(
                    lambda stats: stats[tier]["written"] >= 4 and not stats["num_unwritten_rows"]
                )
                sidecar.terminate()
                sidecar.arena_path.unlink()
                sidecar.start()
                wait_attached(engine)
                told = watch(sidecar, engine)
                run(engine, prompt)  # which may compute what does not come at once
                sidecar.wait_until(lambda stats: stats[tier]["promoted"] == 4)
                run(engine, prompt)
                run(engine, prompt)
                chunks = ["".join(letters) for letters in zip(*told.tiers(3), strict=True)]
            own.close()
    assert all(re.fullmatch(f"-?{tier[0]}m+", letters) for letters in chunks), chunks
