"""Faults of prefill and decode engines and their sidecars. The decode engine computes what is missing."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, Generated, ServedEngine
from tests.harness.prefill_decode import (
    CHUNK,
    TO_DECODE,
    Pools,
    RoutedPools,
    assert_nothing_leaks,
    make_prompt,
    routed_pools,
    wait_attached,
)

pytestmark = pytest.mark.vllm

LONG_CHUNKS, STEP_CHUNKS = 32, 8


def compute(engine: EngineProcess, prompt: list[int], max_tokens: int = 8) -> Generated:
    """Run a prompt that finds no KV, because another tenant stores it."""
    (answer,) = engine.generate(prompt, max_tokens=max_tokens, cache_salt="reference")
    assert answer.num_cached_tokens == 0
    return answer


def wait_partly_stored(pools: Pools, prompt: list[int]) -> None:
    """Start the prompt in the prefill engine, and wait until the chunks of a step are stored."""
    before = pools.sidecars[0].stats()["memory"]["used_rows"]
    pools.prefill.start_generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
    pools.sidecars[0].wait_until(lambda stats: stats["memory"]["used_rows"] >= before + STEP_CHUNKS)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_prefill_engine_fails_during_the_prompt(tmp_path: Path, num_nodes: int, fault: str) -> None:
    prompt = make_prompt("long", LONG_CHUNKS)
    with Pools(tmp_path, num_nodes) as pools:
        expected = compute(pools.decode, prompt)
        wait_partly_stored(pools, prompt)
        getattr(pools.prefill, fault)()
        # The first rows are committed in order; the request waits for those that are being stored.
        wait_until(lambda: num_rows(pools, 0) >= 1 + STEP_CHUNKS)
        (answer,) = pools.decode.generate(prompt)
        assert answer.tokens == expected.tokens
        assert answer.finish_reason == "length"
        if fault == "freeze":
            pools.prefill.thaw()
            (first,) = pools.prefill.finish_generate()
            assert first.tokens == expected.tokens[:1]
        for sidecar in pools.sidecars:
            assert_nothing_leaks(sidecar)

        def is_full_hit() -> bool:
            (again,) = pools.decode.generate(prompt)
            assert again.tokens == expected.tokens
            return again.num_used_cached_tokens == LONG_CHUNKS * CHUNK

        wait_until(is_full_hit, what="rows that were reserved can be stored")


def num_rows(pools: Pools, node: int) -> int:
    return int(pools.sidecars[node].stats()["memory"]["used_rows"])


@pytest.mark.parametrize("node", [0, 1])
def test_sidecar_is_frozen_after_the_hand_over(tmp_path: Path, node: int) -> None:
    prompts = [make_prompt(f"frozen {number}") for number in range(2)]
    # Without patience: a frozen sidecar must not hold up an answer.
    with Pools(tmp_path, 2, answer_seconds=0.0, peer_answer_seconds=0.005) as pools:
        for prompt in prompts:
            expected = compute(pools.decode, prompt)
            (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
            pools.sidecars[node].freeze()
            (answer,) = pools.decode.generate(prompt, kv_transfer_params=first.kv_transfer_params)
            assert answer.tokens == expected.tokens
            pools.sidecars[node].thaw()
            for sidecar in pools.sidecars:
                assert_nothing_leaks(sidecar)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_decode_engine_is_killed_after_the_hand_over(tmp_path: Path, num_nodes: int) -> None:
    prompt = make_prompt("killed")
    with Pools(tmp_path, num_nodes) as pools:
        expected = compute(pools.decode, prompt)
        (first,) = pools.prefill.generate(prompt, max_tokens=1, kv_transfer_params=TO_DECODE)
        before = sum(pools.sidecars[1].stats()["causes"]["cause_tokens"].values())
        pools.decode.start_generate(prompt, max_tokens=2000, kv_transfer_params=first.kv_transfer_params)
        pools.sidecars[1].wait_until(lambda stats: sum(stats["causes"]["cause_tokens"].values()) > before)
        pools.decode.kill()
        for sidecar in pools.sidecars:
            assert_nothing_leaks(sidecar)
        with pools.engine("second", pools.sidecars[1]) as second:
            wait_attached(second)
            (answer,) = second.generate(prompt, kv_transfer_params=first.kv_transfer_params)
            assert answer.tokens == expected.tokens
            assert answer.num_used_cached_tokens == len(prompt) // CHUNK * CHUNK
        for sidecar in set(pools.sidecars):
            assert_nothing_leaks(sidecar)
            assert sidecar.terminate() == 0, "no reader holds it up"


def is_idle(engine: ServedEngine) -> bool:
    return not any(engine.metrics("vllm:num_requests_").values())


def cancel(pools: RoutedPools, prompt: list[int], *, is_answering: bool) -> None:
    """Send a prompt, and close the connection while the prompt is computed, or after the first token."""
    request = pools.request(prompt, 4000, stream=True)
    url = urlsplit(request.full_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=300)
    connection.request("POST", url.path, request.data, dict(request.headers))
    if is_answering:
        assert connection.getresponse().read(20)
    else:
        wait_until(lambda: not is_idle(pools.prefill), what="the prompt is being computed")
    connection.close()


def test_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with routed_pools(tmp_path, 2) as pools:
        for number, is_answering in enumerate((False, True)):
            prompt = make_prompt(f"cancelled {number}", 16)
            cancel(pools, prompt, is_answering=is_answering)
            wait_until(lambda: is_idle(pools.prefill) and is_idle(pools.decode), what="no request runs")
            for sidecar in pools.sidecars:
                assert_nothing_leaks(sidecar)
            (answer,) = pools.ask(prompt)
            expected = pools.alone.complete(prompt)
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            assert num_loaded(pools, answer["id"]) == 16 * CHUNK


def num_loaded(pools: RoutedPools, request: str) -> int:
    """Tokens that the decode engine loaded for a request. The answer has those of the prefill engine."""

    def find() -> list[dict[str, int]]:
        page = json.loads(pools.sidecars[1].get(f"/requests?id={quote(request)}"))
        return [each["tokens"] for each in page["requests"]]

    (tokens,) = wait_until(find, what="the request in the decode engine's sidecar")
    return tokens.get("memory", 0) + tokens.get("peers", 0)
