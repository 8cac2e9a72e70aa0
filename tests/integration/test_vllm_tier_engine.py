"""A real engine with vLLM's own offloading over this project's disk tier: loaded KV equals computed KV."""

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


def chunk_files(disk):
    """Files of chunks: each has 1 MiB and a header."""
    files = [file for file in disk.rglob("*") if file.is_file() and file.suffix != ".tmp"]
    return [file for file in files if file.stat().st_size > 1 << 20]


def test_kv_loaded_by_another_engine_equals_computed_kv(tmp_path):
    prompt, other = make_prompt("hit"), make_prompt("other")
    disk = tmp_path / "disk"
    with EngineProcess(tmp_path / "first.log", offloading_config(disk)) as engine:
        (computed,) = engine.generate(prompt)
        (cold,) = engine.generate(other)
        assert (computed.num_cached_tokens, cold.num_cached_tokens) == (0, 0)
        engine.generate(make_prompt("steps")[:64])  # vLLM passes chunks on during further steps
        wait_until(lambda: len(chunk_files(disk)) == 2 * NUM_CHUNKS, timeout=60)
    with EngineProcess(tmp_path / "second.log", offloading_config(disk)) as engine:
        # A hit shows that the fingerprint of the weights is known. A busy machine may need several attempts.
        wait_until(lambda: engine.generate(other)[0].num_cached_tokens, timeout=60)
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)
        (half_hit,) = engine.generate([*prompt[: NUM_TOKENS // 2], *other[NUM_TOKENS // 2 :]])
    assert hit.num_cached_tokens == NUM_CHUNKS * BLOCK * BLOCKS_PER_CHUNK
    assert hit.tokens == computed.tokens
    assert hit.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
    end = NUM_CHUNKS * BLOCKS_PER_CHUNK
    for layer, (loaded, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert loaded[:end] == expected[:end], f"layer {layer}"
    assert half_hit.num_cached_tokens == NUM_CHUNKS // 2 * BLOCK * BLOCKS_PER_CHUNK
    log = (tmp_path / "second.log").read_text()
    assert "stay private" not in log
    assert "goes offline" not in log
