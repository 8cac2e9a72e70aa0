"""Speculative decoding in a real vLLM: the V1 runner then asks for ended stores before new stores begin.

Accepted drafts complete a chunk in a request's last step, and its blocks are reused at once: KV memory is
small, and queued requests take the blocks in the next step. A copy is faster than the next step, so the order
of hooks is tested where copies can be held back: test_vllm_transfers.py and test_vllm_lifetimes.py.
"""

from __future__ import annotations

import random

import pytest

from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 32, 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with SidecarProcess(memory_size="256Mi") as sidecar:
        config = connector_config(sidecar.socket_path, answer_seconds=30.0, chunk_tokens=CHUNK)
        speculative = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
        log = tmp_path_factory.mktemp("speculation") / "log"
        with EngineProcess(
            log,
            config,
            speculative_config=speculative,
            max_model_len=1000,
            kv_cache_memory_bytes=6 << 20,
            max_num_batched_tokens=512,
        ) as engine:
            engine.wait_ready()
            sidecar.wait_attached(engine.run_short_request)
            sidecar.wait_until(lambda stats: stats["memory"]["usable_rows"] > 0)
            yield engine


def make_prompt(num_tokens, seed):
    """A repetitive prompt, so that drafts are made. The tiny model's answers are repetitive, too."""
    tokens = random.Random(f"{num_tokens} {seed}")
    return ([tokens.randrange(4, 260) for _ in range(12)] * num_tokens)[:num_tokens]


def test_stored_kv_equals_computed_kv(engine):
    prompts = [make_prompt(90 + 11 * i, i) for i in range(24)]
    turns = list(zip(prompts, engine.generate(*prompts, max_tokens=70), strict=True))
    engine.scrub_kv()
    num_loaded = 0
    for prompt, turn in turns:
        (hit,) = engine.generate(prompt + turn.tokens + [5], max_tokens=1)
        num_loaded += hit.num_cached_tokens
        end = hit.num_cached_tokens // BLOCK
        for layer, (loaded, computed) in enumerate(zip(hit.kv, turn.kv, strict=True)):
            assert loaded[:end] == computed[:end], f"layer {layer}"
    assert num_loaded > len(turns) * CHUNK, "most prompts must hit"
