"""First half: one prompt, three engines. Cold; from the sidecar's memory; from Redis."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from demo.show import command, note, step, title
from testing.engine.process import ServedEngine, connector_config
from testing.processes import RedisProcess, SidecarProcess

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, ANSWER_TOKENS, CHUNK_TOKENS = 8192, 32, 256
ENGINE_PORT = 18080


@dataclass(frozen=True)
class Answer:
    """What one request brought."""

    ttft_seconds: float
    tokens: list[int]
    num_cached_tokens: int


def prompt() -> list[int]:
    """A long document: in the tiny model's tokenizer, every character is a token."""
    text = (ROOT / "LICENSE").read_text()[:PROMPT_TOKENS]
    assert len(text) == PROMPT_TOKENS
    return [4 + (ord(character) % 256) for character in text]


def ask(url: str, tokens: list[int], max_tokens: int) -> Answer:
    """One streamed completion; the first chunk with a token ends the time to first token."""
    body = {
        "model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    answer: list[int] = []
    ttft, cached, start = 0.0, 0, time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            for choice in chunk["choices"]:
                ttft = ttft or time.monotonic() - start
                answer += choice.get("token_ids") or []
            if usage := chunk.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(ttft, answer, cached)


def one_engine(what: str, sidecar: SidecarProcess, log: Path) -> Answer:
    """Start an engine whose KV cache is empty, ask, and stop it."""
    config = connector_config(sidecar.socket_path)
    command(f'vllm serve tiny --kv-transfer-config \'{{"kv_connector": "{config["kv_connector"]}", ...}}\'')
    with ServedEngine(log, ENGINE_PORT, config) as engine:
        with step("a new vLLM server, its KV cache empty (real vLLM on the CPU, a tiny random-weight Llama)"):
            engine.wait_ready()
        ask(engine.url, [7] * CHUNK_TOKENS, 1)  # the first request of a process pays for lazy imports
        answer = ask(engine.url, prompt(), ANSWER_TOKENS)
        note(f"answer: {answer.tokens[:12]} ...")
        note(f"{what}: first token after {answer.ttft_seconds * 1e3:.0f} ms,"
             f" {answer.num_cached_tokens} of {PROMPT_TOKENS} prompt tokens from the cache")  # fmt: skip
    return answer


def wait_until_written(sidecar: SidecarProcess) -> None:
    """Until the prompt's chunks are in Redis."""
    rows = PROMPT_TOKENS // CHUNK_TOKENS
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= rows)


def run(logs: Path) -> dict[str, object]:
    """The three rounds; returns what goes into the report."""
    title("1. One prompt of 8,192 tokens, three engines that never met")
    rounds: dict[str, Answer] = {}
    with RedisProcess() as redis:
        with sidecar_over(redis) as sidecar:
            rounds["cold"] = one_engine("cold", sidecar, logs / "engine-1.log")
            wait_until_written(sidecar)
            note("The engine is stopped: its own KV is gone. The sidecar stays.")
            rounds["memory hit"] = one_engine("memory hit", sidecar, logs / "engine-2.log")
            with step("stopping engine and sidecar; the memory tier is thrown away, only Redis is left"):
                sidecar.terminate()
        with sidecar_over(redis) as sidecar:
            rounds["remote hit"] = one_engine("remote hit", sidecar, logs / "engine-3.log")
    return report(rounds)


def sidecar_over(redis: RedisProcess) -> SidecarProcess:
    command(f"lmcache-sidecar serve --memory-size 512Mi --remote-url {redis.unix_url}")
    return SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url)


def report(rounds: dict[str, Answer]) -> dict[str, object]:
    """Raises AssertionError when a hit's answer is not the cold one."""
    cold = rounds["cold"]
    for name, answer in rounds.items():
        assert answer.tokens == cold.tokens, f"{name}: another answer than cold"
    note(f"All three answers are the same {len(cold.tokens)} tokens, token for token.")
    return {
        name: {
            "ttft_ms": round(answer.ttft_seconds * 1e3, 1),
            "share_of_cold": round(answer.ttft_seconds / cold.ttft_seconds, 3),
            "cached_tokens": answer.num_cached_tokens,
            "same_answer": True,
        }
        for name, answer in rounds.items()
    }
