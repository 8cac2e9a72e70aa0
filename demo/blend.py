"""Last part: one prompt of documents and a question. It is cold, then blended, then partly cached.

The engine of the first part computes each document once, alone. The prompt has them in another order, so
prefix caching finds only the document with which the prompt begins.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from demo.engine import ROOT, Running, as_tokens, completion, wait_until_written
from demo.show import command, note, part, step

DOCUMENTS = ("kv-groups", "pods", "prompt", "sizes")
"""Pages of ``docs/concepts``."""
ORDER = (2, 0, 3, 1)
"""Order of the documents in the prompt."""
DOCUMENT_TOKENS, NUM_ROUNDS = 2048, 2
QUESTION = "Question: when does an engine compute a prompt that the cache has? Answer: "


@dataclass(frozen=True)
class Prompt:
    """Documents and a question, as tokens. KV of a prompt with another ``salt`` is not found."""

    documents: tuple[list[int], ...]
    question: list[int]
    salt: str

    @property
    def tokens(self) -> list[int]:
        return [*chain(*self.documents), *self.question]

    @property
    def blend(self) -> dict[str, Any]:
        """Parameters of a request that asks to blend this prompt."""
        return {"blend": {"documents": list(map(len, self.documents))}}


@dataclass(frozen=True)
class Answer:
    """Answer of one token, so that its time is the time to first token."""

    ttft_seconds: float
    num_cached_tokens: int
    blended: dict[str, int] | None
    """Tokens of a blended prompt, as the engine counts them. None: the engine computed the prompt exactly."""

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by where their KV comes from, for the report."""
        if self.blended is None:
            return {"cached_tokens": self.num_cached_tokens}
        return {"reused_tokens": self.blended["tokens"], "recomputed_tokens": self.blended["recomputed"]}

    def describe(self, num_tokens: int) -> str:
        """Return a line about the answer to a prompt of ``num_tokens`` tokens."""
        first = f"first token after {self.ttft_seconds * 1e3:.0f} ms"
        if self.blended is None:
            return f"{first}, {self.num_cached_tokens:,} of {num_tokens:,} prompt tokens from the cache"
        reused, recomputed = self.counts.values()
        return f"{first}, KV of {reused:,} tokens reused, {recomputed:,} computed again"


Rounds = dict[str, Answer]
"""Answers to the prompt, by how it was computed."""


def prompt() -> Prompt:
    """Return the prompt to measure."""
    pages = [(ROOT / "docs" / "concepts" / f"{DOCUMENTS[number]}.md").read_text() for number in ORDER]
    assert min(map(len, pages)) >= DOCUMENT_TOKENS
    documents = tuple(as_tokens(page[:DOCUMENT_TOKENS]) for page in pages)
    return Prompt(documents, as_tokens(QUESTION), "")


def run(running: Running) -> dict[str, object]:
    """Measure the prompt on an engine of the first part. Returns the figures for the report."""
    measured = prompt()
    num_documents = len(measured.documents)
    part(f"Blending: a prompt of {num_documents} known documents in another order (CacheBlend)")
    note(
        f"The third engine also blends prompts. This prompt has {num_documents} pages of docs/concepts and a"
    )
    note(f"question, {len(measured.tokens):,} tokens in all. First, each document is computed once, alone:")
    show_parameters({"document": True})
    note("Then the prompt is blended:")
    show_parameters(measured.blend)
    rounds = []
    for number in range(1, NUM_ROUNDS + 1):
        with step(
            f"round {number}: the prompt cold, each document, the blended prompt, and the exact one again"
        ):
            rounds.append(measure(running, measured, number))
    best = fastest(rounds)
    note(f"The faster answers of {NUM_ROUNDS} rounds:")
    for name, answer in best.items():
        note(f"{name}: {answer.describe(len(measured.tokens))}")
    note("Prefix caching finds the first document only, because the text before the others has changed.")
    note("The blended answer is an approximation. Engines blend only the prompts that ask for it.")
    note("The tiny model has random weights, so its times are real, but its answers have no meaning.")
    note("docs/reference/blend.md compares answers of a real model. docs/guides/blend.md shows how to blend.")
    return report(best)


def measure(running: Running, prompt: Prompt, number: int) -> Rounds:
    """Send the prompt in each way. KV of a round with another number is not found."""
    cold = ask_new(running, replace(prompt, salt=f"cold {number}"))
    prompt = replace(prompt, salt=f"documents {number}")
    announce(running, prompt)
    # In this order, because nothing of a blended prompt is stored.
    blended = ask(running, prompt, **prompt.blend)
    return {"cold": cold, "prefix cached": ask(running, prompt), "blended": blended}


def fastest(rounds: Sequence[Rounds]) -> Rounds:
    """Return the fastest answer of each way. The first round pays for what an engine does only once."""
    return {name: min((each[name] for each in rounds), key=lambda a: a.ttft_seconds) for name in rounds[0]}


def show_parameters(parameters: dict[str, Any]) -> None:
    """Print the command of a request with these parameters of the connector."""
    content = json.dumps({"lmcache": parameters})
    command(f"""curl .../v1/completions -d '{{..., "kv_transfer_params": {content}}}'""")


def report(rounds: Rounds) -> dict[str, object]:
    """Return the figures for the report."""
    cold = rounds["cold"].ttft_seconds
    return {
        name: {
            "ttft_ms": round(answer.ttft_seconds * 1e3, 1),
            "share_of_cold": round(answer.ttft_seconds / cold, 3),
            **answer.counts,
        }
        for name, answer in rounds.items()
    }


def announce(running: Running, prompt: Prompt) -> None:
    """Compute each document alone."""
    for document in prompt.documents:
        ask_new(running, Prompt((document,), [], prompt.salt), document=True)


def ask_new(running: Running, prompt: Prompt, **parameters: Any) -> Answer:
    """Send a prompt with new KV only. Returns after the sidecar has written its rows."""
    num_rows = running.sidecar.stats()["memory"]["used_rows"] + len(prompt.tokens) // running.chunk_tokens
    answer = ask(running, prompt, **parameters)
    wait_until_written(running.sidecar, num_rows)
    return answer


def ask(running: Running, prompt: Prompt, **parameters: Any) -> Answer:
    """Send one completion. ``parameters`` are those of the connector."""
    extra = {"kv_transfer_params": {"lmcache": parameters}} if parameters else {}
    # Before version 0.33, vLLM leaves the counts of blended tokens out of streamed answers.
    request = completion(running.engine.url, prompt.tokens, 1, cache_salt=prompt.salt, **extra)
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    seconds = time.monotonic() - start
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    blended = ((answer.get("kv_transfer_params") or {}).get("lmcache") or {}).get("blended")
    if "blend" in parameters and blended is None:
        raise RuntimeError("vLLM did not blend the prompt. The reason is in demo/logs/engine-3.log.")
    return Answer(seconds, cached, blended)
