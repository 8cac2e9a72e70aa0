"""A prefill engine computes prompts, and a decode engine answers. The KV passes through their sidecars."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, Generated
from tests.harness.prefill_decode import (
    BLOCK,
    CHUNK,
    NUM_CHUNKS,
    TAIL,
    TO_DECODE,
    Pools,
    assert_nothing_leaks,
    make_prompt,
    routed_pools,
)

pytestmark = pytest.mark.vllm


def assert_same(answer: Generated, expected: Generated) -> None:
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    num_blocks = NUM_CHUNKS * CHUNK // BLOCK
    for layer, (loaded, computed) in enumerate(zip(answer.kv, expected.kv, strict=True)):
        assert loaded[:num_blocks] == computed[:num_blocks], f"layer {layer}"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_decode_engine_answers_like_one_engine_from_the_prefill_engines_kv(
    tmp_path: Path, num_nodes: int
) -> None:
    prompts = [make_prompt(f"{number}") for number in range(3)]
    with Pools(tmp_path, num_nodes) as pools, EngineProcess(tmp_path / "alone.log") as alone:
        expected = [alone.generate(prompt)[0] for prompt in prompts]
        source = "memory" if num_nodes == 1 else "peers"
        before = pools.num_loaded_tokens(source)
        for prompt, computed in zip(prompts, expected, strict=True):
            pools.decode.scrub_kv()
            (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
            (answer,) = pools.decode.generate(prompt, kv_transfer_params=first.kv_transfer_params)
            assert first.num_cached_tokens == 0
            assert first.kv_transfer_params is not None
            assert first.kv_transfer_params["lmcache"]["num_tokens"] == NUM_CHUNKS * CHUNK
            assert first.tokens == computed.tokens[:1]
            assert answer.num_used_cached_tokens == len(prompt) - TAIL, "only the tail is computed twice"
            assert_same(answer, computed)
        assert pools.num_loaded_tokens(source) - before == len(prompts) * NUM_CHUNKS * CHUNK
        if num_nodes == 2:
            served = pools.sidecars[0].stats()["peer_server"]["read_columns"]
            assert served == len(prompts) * NUM_CHUNKS
        for sidecar in pools.sidecars:
            assert_nothing_leaks(sidecar)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_router_sends_prompts_to_one_pool_and_returns_answers_of_the_other(
    tmp_path: Path, num_nodes: int
) -> None:
    """On a busy machine, a call to a sidecar may be late. The second engine then computes the prompt."""
    with routed_pools(tmp_path, num_nodes) as pools:
        source = "memory" if num_nodes == 1 else "peers"
        before = pools.num_loaded_tokens(source)

        def are_loaded() -> bool:
            return pools.num_loaded_tokens(source) - before >= 4 * NUM_CHUNKS * CHUNK

        numbers = itertools.takewhile(lambda number: number < 4 or not are_loaded(), range(16))
        for number in numbers:
            prompt = make_prompt(f"routed {number}")
            answer = pools.ask(prompt, stream=number % 2 == 1)
            assert tokens_of(answer) == tokens_of([pools.alone.complete(prompt, 8)])
        wait_until(are_loaded, what="the KV of four prompts was loaded")
        for sidecar in pools.sidecars:
            assert_nothing_leaks(sidecar)


def tokens_of(answers: list[dict[str, Any]]) -> list[int]:
    return [token for answer in answers for each in answer["choices"] for token in each["token_ids"] or ()]
