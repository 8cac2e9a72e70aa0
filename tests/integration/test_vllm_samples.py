"""The sidecar's samples describe what vLLM's scheduler did with requests, and where their KV was found."""

import re
import threading
import time

import pytest

from testing.processes import RedisProcess
from tests.harness.sidecar.samples import Watch
from tests.harness.sim.config import CHUNK, SimGroup, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, only_engine, serving_world, wait_attached

pytestmark = pytest.mark.vllm

CACHING = SimSettings(num_blocks=256, has_prefix_caching=True)

MEMORY_SIZE = "6Mi"
"""A size with so few rows that all keys are sampled."""


@pytest.fixture(scope="module")
def world():
    with serving_world(memory_size=MEMORY_SIZE) as world:
        yield world


def watch(sidecar, *engines):
    """Watch samples from now on, once earlier requests are reported: the scheduler does not wait for that."""
    for engine in engines:
        wait_reported(engine)
    return Watch(sidecar)


def wait_reported(engine):
    reported = threading.Event()
    engine.scheduler.connector._scheduler._lookups._queue.put(reported.set)
    assert reported.wait(60)


def run(engine, tokens, **fields):
    """Run one request alone."""
    name = engine.add(tokens, **fields)
    engine.run(name)
    engine.run()
    return engine.results[name]


def test_each_request_is_sampled_once_with_the_tier_of_each_chunk(world):
    prompt = make_tokens(4 * CHUNK + 5)
    with world.engines(CACHING) as (engine,):
        watcher = watch(world.sidecar, engine)
        run(engine, prompt)
        engine.serve(prompt)
        run(engine, prompt)
        engine.serve([*prompt[: 4 * CHUNK], *make_tokens(2 * CHUNK)])
        run(engine, [*prompt[: 2 * CHUNK], *make_tokens(CHUNK)])
        cold, engine_hit, memory_hit, longer, shared = requests = watcher.next(5)
    assert [request.tiers[::-1] for request in requests] == ["----", "eeee", "mmmm", "eeee--", "mm-"]
    assert cold.keys == engine_hit.keys == memory_hit.keys == longer.keys[-4:]
    assert shared.keys[-2:] == cold.keys[-2:]
    # real time: the operator compares the times of all pods.
    assert abs(requests[-1].time - time.time()) < 600


def test_prompt_that_ends_with_a_chunk_is_a_full_hit(world):
    """One token must be computed, but its chunk is cached and counts as a hit."""
    prompt = make_tokens(3 * CHUNK)
    with world.engines(CACHING) as (engine,):
        watcher = watch(world.sidecar, engine)
        run(engine, prompt)
        engine.serve(prompt)
        assert run(engine, prompt).num_cached_tokens > 2 * CHUNK
        assert watcher.tiers(3) == ["---", "eee", "mmm"]


def test_chunk_partly_in_the_engine_counts_as_a_memory_hit(world):
    """vLLM caches blocks. A chunk has several blocks."""
    prompt = make_tokens(2 * CHUNK + 5)
    with world.engines(CACHING) as (engine,):
        engine.serve(prompt)
        watcher = watch(world.sidecar, engine)
        num_loaded_before = world.sidecar.stats()["lookups"]["loaded_tokens"].get("memory", 0)
        run(engine, prompt[: CHUNK + CHUNK // 2])
        run(engine, prompt)
        assert watcher.tiers(2) == ["m", "em"]
        num_loaded = world.sidecar.stats()["lookups"]["loaded_tokens"]["memory"] - num_loaded_before
        assert num_loaded == CHUNK + CHUNK // 2


def test_queued_requests_with_several_lookups_are_sampled_once(world):
    prompts = [make_tokens(3 * CHUNK + 1) for _ in range(4)]
    with world.engines(SimSettings(num_blocks=40, max_num_seqs=1)) as (engine,):
        for prompt in prompts:
            run(engine, prompt)
        watcher = watch(world.sidecar, engine)
        world.load_gate.shut()
        names = [engine.add(prompt) for prompt in [*prompts, *prompts]]
        for _ in range(50):
            engine.step()
        world.load_gate.open()
        engine.run(*names)
        assert_idle(engine)
        requests = watcher.next(8)
    assert [request.tiers for request in requests] == ["mmm"] * 8
    assert sorted(request.keys for request in requests[:4]) == sorted(
        request.keys for request in requests[4:]
    )


def test_preempted_and_resumed_request_is_sampled_again(world):
    with world.engines(SimSettings(num_blocks=21, max_num_seqs=2)) as (engine,):
        watcher = watch(world.sidecar, engine)
        first = engine.add(make_tokens(2 * CHUNK + 1), max_tokens=60)
        second = engine.add(make_tokens(2 * CHUNK + 1), max_tokens=60)
        engine.run(first, second)
        assert_idle(engine)
        wait_reported(engine)
        first, second, *resumed = watcher.now()
    assert (first.tiers, second.tiers) == ("--", "--")
    assert resumed
    for request in resumed:  # its computed chunks were stored, if the machine was fast enough
        assert request.keys[-2:] in (first.keys, second.keys)


def test_samples_cover_requests_of_both_engines(world):
    prompts = [make_tokens(2 * CHUNK + 1) for _ in range(2)]
    with world.engines(CACHING, CACHING) as (first, second):
        watcher = watch(world.sidecar, first, second)
        lookups_before = world.sidecar.stats()["lookups"]
        run(first, prompts[0])
        run(second, prompts[0])
        run(second, prompts[1])
        run(first, prompts[1])
        assert watcher.tiers(4) == ["--", "mm", "--", "mm"]
        lookups_after = world.sidecar.stats()["lookups"]
        kv_bytes = sum(engine.ranks[0].pages.nbytes for engine in (first, second))
    assert lookups_after["gpus"] == 2
    assert lookups_after["engine_kv_bytes"] == kv_bytes
    for name, number in (("num_lookups", 4), ("lookup_tokens", 8 * CHUNK)):
        assert lookups_after[name] - lookups_before[name] == number
    for name in ("hit_tokens", "loaded_tokens"):
        assert lookups_after[name]["memory"] - lookups_before[name].get("memory", 0) == 4 * CHUNK


def test_chunk_with_full_attention_and_windows_is_sampled_as_one_key(world):
    groups = (SimGroup(), SimGroup("window", span=24))
    prompt = make_tokens(4 * CHUNK + 1)
    settings = SimSettings(num_blocks=256, groups=groups)
    with only_engine(settings, memory_size=MEMORY_SIZE) as (sidecar, engine):
        watcher = watch(sidecar, engine)
        run(engine, prompt)
        run(engine, prompt)
        requests = watcher.next(2)
        stats = sidecar.stats()
    assert [request.tiers for request in requests] == ["----", "mmmm"]
    lookups, geometry = stats["lookups"], stats["geometry"]
    assert lookups["row_bytes"] % geometry["slot_bytes"] == 0
    assert lookups["row_bytes"] >= lookups["kv_bytes_per_token"] * CHUNK


@pytest.mark.redis
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_promoted_chunk_is_a_hit_of_the_lower_tier_once(tier, tmp_path):
    prompt = make_tokens(4 * CHUNK + 1)
    with RedisProcess() as redis:
        options = (
            {"disk_path": tmp_path, "disk_size": "64Mi"} if tier == "disk" else {"remote_url": redis.unix_url}
        )
        settings = SimSettings(num_blocks=64)
        with only_engine(settings, memory_size=MEMORY_SIZE, **options) as (sidecar, engine):
            watcher = watch(sidecar, engine)
            run(engine, prompt)
            assert watcher.tiers(1) == ["----"]
            sidecar.wait_until(lambda stats: stats[tier]["written"] >= 4 and not stats["num_unwritten_rows"])
            sidecar.terminate()
            sidecar.arena_path.unlink()
            sidecar.start()
            wait_attached(engine)
            watcher = watch(sidecar, engine)
            run(engine, prompt)  # may compute chunks whose promotion takes too long
            sidecar.wait_until(lambda stats: stats[tier]["promoted"] == 4)
            run(engine, prompt)
            run(engine, prompt)
            chunks = ["".join(letters) for letters in zip(*watcher.tiers(3), strict=True)]
    assert all(re.fullmatch(f"-?{tier[0]}m+", letters) for letters in chunks), chunks
