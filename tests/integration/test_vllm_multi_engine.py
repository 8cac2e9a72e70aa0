"""The connector next to vLLM's ExampleConnector in a real engine: KV loaded by either equals computed KV."""

from __future__ import annotations

import random
import shutil

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config, example_config, multi_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""

BLOCK, CHUNK, NUM_TOKENS, NUM_CHUNKS = 32, 256, 1050, 4


def make_prompt(seed):
    tokens = random.Random(seed)
    return [tokens.randrange(4, 260) for _ in range(NUM_TOKENS)]


def wait_attached(engine, sidecar):
    """Wait until lookups arrive: in a MultiConnector the engine's identity follows with the first step."""
    engine.wait_ready()
    sidecar.wait_until(lambda stats: any(client["is_attached"] for client in stats["clients"]), timeout=60)
    sidecar.wait_until(lambda stats: stats["memory"]["usable_rows"] >= 4 * NUM_CHUNKS, timeout=60)
    num_misses = sidecar.stats()["memory"]["misses"]

    def has_asked() -> bool:
        engine.generate(make_prompt(random.random())[: CHUNK + BLOCK])
        return sidecar.stats()["memory"]["misses"] > num_misses

    wait_until(has_asked, timeout=60)


def assert_hit(hit, computed, num_loaded):
    assert hit.num_cached_tokens == num_loaded
    assert hit.tokens == computed.tokens
    assert hit.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
    end = num_loaded // BLOCK
    for layer, (loaded, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert loaded[:end] == expected[:end], f"layer {layer}"


@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
def test_kv_loaded_by_either_connector_equals_computed_kv(is_first, tmp_path):
    storage = tmp_path / "example"
    with SidecarProcess(memory_size="256Mi") as sidecar:
        both = [connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS), example_config(storage)]
        config = multi_config(*(both if is_first else both[::-1]))
        with EngineProcess(tmp_path / "log", config) as engine:
            wait_attached(engine, sidecar)
            memory_before = sidecar.stats()["memory"]
            prompt = make_prompt("prompt")
            (computed,) = engine.generate(prompt)
            assert computed.num_cached_tokens == 0
            sidecar.wait_until(
                lambda stats: stats["memory"]["used_rows"] >= memory_before["used_rows"] + NUM_CHUNKS
            )
            engine.scrub_kv()
            (hit,) = engine.generate(prompt)  # loaded by the first connector of the list that has the chunks
            by_ours, by_example = NUM_CHUNKS * CHUNK, (NUM_TOKENS - 1) // BLOCK * BLOCK
            assert_hit(hit, computed, by_ours if is_first else by_example)
            shutil.rmtree(storage)
            engine.scrub_kv()
            (hit,) = engine.generate(prompt)
            assert_hit(hit, computed, by_ours)
            sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
    log = (tmp_path / "log").read_text()
    assert "offline" not in log
    assert "LMCache Cluster is off" not in log
