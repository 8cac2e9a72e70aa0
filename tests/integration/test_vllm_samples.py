"""The sidecar's samples describe what vLLM's scheduler did with requests, and where their KV was found."""

import time

import pytest

from tests.harness.sidecar.samples import Watch
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import make_tokens, serving_world, wait_reported

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
    assert (lookups_after["gpus"], lookups_after["computes_on_cpu"]) == (2, True)
    assert lookups_after["engine_kv_bytes"] == kv_bytes
    for name, number in (("num_lookups", 4), ("lookup_tokens", 8 * CHUNK)):
        assert lookups_after[name] - lookups_before[name] == number
    for name in ("hit_tokens", "loaded_tokens"):
        assert lookups_after[name]["memory"] - lookups_before[name].get("memory", 0) == 4 * CHUNK
