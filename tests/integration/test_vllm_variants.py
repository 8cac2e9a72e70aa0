"""Engines with other options than most: loaded KV equals computed KV with each of them.

Speculation: the V1 runner asks for ended stores before new stores begin. Accepted drafts complete a chunk in
a request's last step, and its blocks are reused at once: KV memory is small, and queued requests take the
blocks in the next step. A copy is faster than the next step, so the order of hooks is tested where copies can
be held back: test_vllm_lifetimes.py.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, example_config, multi_config, patient_config
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, assert_hit, attached_engine, make_prompt

pytestmark = pytest.mark.vllm

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK + 26


def repetitive_prompt(num_tokens: int) -> list[int]:
    """A prompt for which drafts are made. The tiny model's answers are repetitive, too."""
    return (make_prompt(12, num_tokens) * num_tokens)[:num_tokens]


def test_kv_stored_with_speculation_equals_computed_kv(sidecar: SidecarProcess, tmp_path: Path) -> None:
    chunk = 64
    config = patient_config(sidecar.socket_path, chunk_tokens=chunk)
    speculative = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
    with attached_engine(
        sidecar,
        tmp_path,
        config,
        speculative_config=speculative,
        max_model_len=1000,
        kv_cache_memory_bytes=6 << 20,
        max_num_batched_tokens=512,
    ) as engine:
        prompts = [repetitive_prompt(90 + 11 * i) for i in range(16)]
        turns = list(zip(prompts, engine.generate(*prompts, max_tokens=70), strict=True))
        engine.scrub_kv()
        num_loaded = 0
        for prompt, turn in turns:
            (hit,) = engine.generate(prompt + turn.tokens + [5], max_tokens=1)
            num_loaded += hit.num_cached_tokens
            end = hit.num_cached_tokens // BLOCK
            for layer, (loaded, computed) in enumerate(zip(hit.kv, turn.kv, strict=True)):
                assert loaded[:end] == computed[:end], f"layer {layer}"
    assert num_loaded > len(turns) * chunk, "most prompts must hit"


@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
def test_kv_loaded_by_either_connector_equals_computed_kv(
    sidecar: SidecarProcess, tmp_path: Path, is_first: bool
) -> None:
    """The connector in vLLM's MultiConnector, next to the ExampleConnector, which stores KV in files."""
    storage = tmp_path / "example"
    both = [patient_config(sidecar.socket_path), example_config(storage)]
    config = multi_config(*(both if is_first else both[::-1]))
    with EngineProcess(tmp_path / "log", config) as engine:
        wait_stored(engine, sidecar, 1, make_prompt(CHUNK + BLOCK))
        prompt = make_prompt(NUM_TOKENS)
        computed = wait_stored(engine, sidecar, 1 + NUM_CHUNKS, prompt)
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)  # loaded by the first connector of the list that has the chunks
        by_ours, by_example = NUM_CHUNKS * CHUNK, (NUM_TOKENS - 1) // BLOCK * BLOCK
        assert_hit(hit, computed, by_ours if is_first else by_example)
        shutil.rmtree(storage)
        engine.scrub_kv()
        assert_hit(engine.generate(prompt)[0], computed, by_ours)
        sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
    log = (tmp_path / "log").read_text()
    assert "offline" not in log
    assert "LMCache Cluster is off" not in log


def wait_stored(engine: EngineProcess, sidecar: SidecarProcess, num_rows: int, prompt: list[int]) -> Any:
    """Run a prompt until the sidecar has this number of rows. Returns the first answer.

    In a MultiConnector the engine's identity follows with the first step.
    """
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0

    def is_stored() -> bool:
        if sidecar.stats()["memory"]["used_rows"] == num_rows:
            return True
        engine.generate(prompt)
        return False

    wait_until(is_stored, what="stored rows")
    sidecar.wait_usable()
    return computed
