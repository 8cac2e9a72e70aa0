"""A real engine with vLLM's own offloading over our disk tier: another engine's hit is what was computed."""

from __future__ import annotations

import random

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess
from testing.engine.tiny_model import tiny_model

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS_PER_CHUNK = 32, 8
NUM_TOKENS, NUM_CHUNKS = 2100, 8


def offloading_config(disk):
    tier = {
        "type": "LMCacheTier",
        "module_path": "lmcache.engines.vllm.tier",
        "disk_path": str(disk),
        "disk_size": "1Gi",
        "weights_path": str(tiny_model()),
        "lookup_seconds": 60,
        "job_seconds": 60,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.harness.host_offloading",
            "cpu_bytes_to_use": 256 << 20,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        },
    }


def make_prompt(seed):
    tokens = random.Random(seed)
    return [tokens.randrange(4, 260) for _ in range(NUM_TOKENS)]


def stored(disk):
    """Files of chunks: 1 MiB and their header."""
    files = [file for file in disk.rglob("*") if file.is_file() and file.suffix != ".tmp"]
    return [file for file in files if file.stat().st_size > 1 << 20]


def test_another_engine_s_hit_is_what_was_computed(tmp_path):
    prompt, other = make_prompt("hit"), make_prompt("other")
    disk = tmp_path / "disk"
    with EngineProcess(tmp_path / "first.log", offloading_config(disk)) as engine:
        (computed,) = engine.generate(prompt)
        (cold,) = engine.generate(other)
        assert (computed.num_cached_tokens, cold.num_cached_tokens) == (0, 0)
        engine.generate(make_prompt("steps")[:64])  # steps in which vLLM hands the chunks on
        wait_until(lambda: len(stored(disk)) == 2 * NUM_CHUNKS, timeout=60)
    with EngineProcess(tmp_path / "second.log", offloading_config(disk)) as engine:
        # The weights are named by the time that this is found, in however many tries on a busy machine.
        wait_until(lambda: engine.generate(other)[0].num_cached_tokens, timeout=60)
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)
        (again,) = engine.generate([*prompt[: NUM_TOKENS // 2], *other[NUM_TOKENS // 2 :]])
    assert hit.num_cached_tokens == NUM_CHUNKS * BLOCK * BLOCKS_PER_CHUNK
    assert hit.tokens == computed.tokens
    assert hit.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
    end = NUM_CHUNKS * BLOCKS_PER_CHUNK
    for layer, (found, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert found[:end] == expected[:end], f"layer {layer}"
    assert again.num_cached_tokens == NUM_CHUNKS // 2 * BLOCK * BLOCKS_PER_CHUNK
    log = (tmp_path / "second.log").read_text()
    assert "stay private" not in log
    assert "goes offline" not in log
