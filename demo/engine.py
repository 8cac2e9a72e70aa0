"""First part: three engines get one prompt. It is cold, then a hit in the sidecar's memory, then in Redis.

No other work runs during a measurement: the build is paused, and the sidecar has written all rows.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.engines import Engine, Kind
from demo.show import command, note, part, step
from lmcache_store.explain import tables
from testing.child_process import reachable_address
from testing.processes import RedisProcess, SidecarProcess

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, ANSWER_TOKENS, WARM_UP_TOKENS = 8192, 32, 256
WARM_UP_TOKEN = {"cold": 7, "memory hit": 8, "remote hit": 9}
"""Token that fills the warm-up prompt of each round. No engine has a hit in its warm-up, so each knows its
speed afterwards. It then waits for rows of Redis as long as it would compute, also on a busy machine."""
SIDECAR_PORT = 9464
Alone = Callable[[], AbstractContextManager[None]]
"""Creates a context in which no other work of the demo runs."""


@dataclass(frozen=True)
class Running:
    """An engine that still runs after this part, and its sidecar."""

    engine: Engine
    sidecar: SidecarProcess
    chunk_tokens: int


@dataclass(frozen=True)
class Answer:
    """Answer to one request, with its time to first token."""

    ttft_seconds: float
    tokens: list[int]
    num_cached_tokens: int


def prompt() -> list[int]:
    """Return the tokens of a long document."""
    tokens = as_tokens((ROOT / "LICENSE").read_text()[:PROMPT_TOKENS])
    assert len(tokens) == PROMPT_TOKENS
    return tokens


def as_tokens(text: str) -> list[int]:
    """Return the tokens of a text. In the tiny model's tokenizer, each character is a token."""
    return [4 + (ord(character) % 256) for character in text]


def completion(url: str, tokens: list[int], max_tokens: int, **options: Any) -> urllib.request.Request:
    """Return a request for a completion of exactly ``max_tokens`` tokens."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body | options).encode(), headers)


def ask(url: str, tokens: list[int], max_tokens: int) -> Answer:
    """Stream one completion. The first chunk with a token ends the time to first token."""
    streamed = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = completion(url, tokens, max_tokens, **streamed)
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


def measure(label: str, kind: Kind, engine: Engine, sidecar: SidecarProcess, alone: Alone) -> Answer:
    """Send the prompt to an engine. Returns after the sidecar has written its rows."""
    warm_up_rows = WARM_UP_TOKENS // kind.chunk_tokens
    rows_before = sidecar.stats()["memory"]["used_rows"]
    with alone():
        # The first request of a process pays for lazy imports.
        ask(engine.url, [WARM_UP_TOKEN[label]] * WARM_UP_TOKENS, 1)
        wait_until_written(sidecar, rows_before + warm_up_rows)
        answer = ask(engine.url, prompt(), ANSWER_TOKENS)
    note(f"answer: {answer.tokens[:12]} ...")
    note(f"{label}: first token after {answer.ttft_seconds * 1e3:.0f} ms,"
         f" {answer.num_cached_tokens} of {PROMPT_TOKENS} prompt tokens from the cache")  # fmt: skip
    wait_until_written(sidecar, warm_up_rows + PROMPT_TOKENS // kind.chunk_tokens)
    return answer


def wait_attached(kind: Kind, engines: Sequence[Engine], sidecar: SidecarProcess) -> None:
    """Wait until the engines of a sidecar use it."""

    def ask_all() -> None:
        for engine in engines:
            ask(engine.url, [7], 1)

    sidecar.wait_attached(ask_all, kind.num_clients * len(engines))


def wait_until_written(sidecar: SidecarProcess, num_rows: int) -> None:
    """Wait until the sidecar has ``num_rows`` rows in memory and has written all of them to Redis."""
    sidecar.wait_until(
        lambda stats: stats["memory"]["used_rows"] >= num_rows and not stats["num_unwritten_rows"]
    )


def explain(sidecar: SidecarProcess) -> None:
    """Print why the tokens of all prompts so far were loaded or computed."""
    command(f"lmcache-sidecar explain --url {sidecar.url}")
    for line in tables.overview(sidecar.stats()["causes"]):
        note(line)


def run(kind: Kind, logs: Path, alone: Alone, end: ExitStack) -> tuple[dict[str, object], Running]:
    """Measure three engines of one kind. Returns the figures for the report, and the third engine.

    The third engine and its sidecar run until ``end`` closes, for further parts.
    """
    part("Three engines answer the same prompt of 8,192 tokens")
    rounds: dict[str, Answer] = {}
    redis = end.enter_context(RedisProcess())
    second = end.enter_context(sidecar_over(redis, http_host=reachable_address(), http_port=SIDECAR_PORT))
    with sidecar_over(redis) as first, ExitStack() as stack:
        engines = [
            stacked.enter_context(kind.start(sidecar, logs / f"engine-{number}.log"))
            for number, (sidecar, stacked) in enumerate(((first, stack), (first, stack), (second, end)), 1)
        ]
        with step(
            f"starting three {kind.name} servers with empty KV caches"
            " (on the CPU, a tiny Llama with random weights)"
        ):
            for engine in engines:
                engine.wait_ready()
            for sidecar, attached in ((first, engines[:2]), (second, engines[2:])):
                wait_attached(kind, attached, sidecar)
        rounds["cold"] = measure("cold", kind, engines[0], first, alone)
        engines[0].close()
        note("The first engine has stopped, and its KV cache is lost. Its sidecar still runs.")
        note("The second engine gets the same prompt.")
        rounds["memory hit"] = measure("memory hit", kind, engines[1], first, alone)
        engines[1].close()
        explain(first)
        with step("stopping the sidecar of both engines: now only Redis has the KV"):
            first.terminate()
        note("The third engine gets the same prompt. Its sidecar has had no request so far.")
        rounds["remote hit"] = measure("remote hit", kind, engines[2], second, alone)
    return report(rounds), Running(engines[2], second, kind.chunk_tokens)


def sidecar_over(redis: RedisProcess, **options: Any) -> SidecarProcess:
    command(f"lmcache-sidecar serve --memory-size 512Mi --remote-url {redis.unix_url}")
    return SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url, **options)


def report(rounds: dict[str, Answer]) -> dict[str, object]:
    """Return the figures for the report. Raises AssertionError if an answer differs from the cold one."""
    cold = rounds["cold"]
    for name, answer in rounds.items():
        assert answer.tokens == cold.tokens, f"{name}: the answer differs from the cold one"
    note(f"All three answers are identical: the same {len(cold.tokens)} tokens.")
    return {
        name: {
            "ttft_ms": round(answer.ttft_seconds * 1e3, 1),
            "share_of_cold": round(answer.ttft_seconds / cold.ttft_seconds, 3),
            "cached_tokens": answer.num_cached_tokens,
            "same_answer": True,
        }
        for name, answer in rounds.items()
    }
