"""Count blended KV in exact answers, among 10,000 mixed requests to one vLLM engine.

Requests have equal texts: a pool of prompts, each made of a beginning, documents and a question. A request is
exact, asks to blend, or announces a document, with or without a salt. A few are aborted. vLLM's cache and the
sidecar hold only a part of all KV, so KV is evicted, loaded and computed again.

The KV of all prompts was computed before the engine blended anything. An answer that does not say that it is
blended must have this KV in each block, up to rounding. The environment variable REQUESTS sets the number of
requests.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.blend_vllm import DOCUMENT, NAIVE, SELECTIONS
from benchmarks.isolation_engine import IsolationEngine
from benchmarks.new_prompts import random_tokens
from benchmarks.report import Figure, Report, at_most, of
from testing.engine.process import Generated, patient_config
from testing.processes import SidecarProcess

REQUESTS = int(os.environ.get("REQUESTS", "10000"))
BATCH, BATCH_STEPS, SHARE_OF_RESETS = 100, 60, 0.1
"""Requests that arrive in so many steps; batches during which all caches are reset."""
DOCUMENT_TOKENS = 64, 96, 150, 200, 260, 333
BEGINNING_TOKENS, QUESTION_TOKENS, NUM_QUESTIONS = (0, 0, 21, 70), (20, 46), 2
POOL = 120
SALTS = None, None, "tenant"
ROUNDING, CERTAIN = 1e-3, 1e-2
"""Largest difference of exact KV; difference that shows that KV was reused from another position."""
MIN_TOKENS = 32


class Prompt(NamedTuple):
    """A prompt of the pool. Documents are prompts without a question."""

    tokens: list[int]
    blend: dict[str, Any]
    """Marks of its documents; empty: it is a document."""


def pool() -> list[Prompt]:
    """Return documents, and prompts that begin with, or contain, the same documents."""
    documents = [random_tokens(seed, size) for seed, size in enumerate(DOCUMENT_TOKENS)]
    prompts = [Prompt(document, {}) for document in documents]
    chosen = random.Random(1)
    while len(prompts) < POOL:
        beginning = random_tokens(100, chosen.choice(BEGINNING_TOKENS))
        parts = chosen.sample(documents, chosen.choice([1, 2, 3]))
        question = random_tokens(200 + chosen.randrange(NUM_QUESTIONS), chosen.choice(QUESTION_TOKENS))
        starts = list(itertools.accumulate(map(len, parts), initial=len(beginning)))
        named = {"start": len(beginning), "documents": list(map(len, parts))}
        marks: dict[str, Any] = chosen.choice([{"starts": starts}, named])
        prompts.append(Prompt([*beginning, *itertools.chain(*parts), *question], marks))
    return prompts


def request(chosen: random.Random, prompts: list[Prompt]) -> dict[str, Any]:
    """Return a request of ``EngineProcess.run``, with what it is: ``kind``."""
    prompt = chosen.choice(prompts[: len(DOCUMENT_TOKENS)] if chosen.random() < 0.15 else prompts)
    made: dict[str, Any] = {"prompt": prompt.tokens, "cache_salt": chosen.choice(SALTS), "kind": "exact"}
    made |= {"max_tokens": chosen.choice([1, 1, 3, 16]), "first_step": chosen.randint(1, BATCH_STEPS)}
    if not prompt.blend:
        made |= {"kind": "document", "kv_transfer_params": DOCUMENT}
    elif chosen.random() < 0.55:
        ratio = chosen.choice([0.05, 0.15, 0.5])
        blend = {**prompt.blend, "selection": chosen.choice([*SELECTIONS, NAIVE, "all"]), "ratio": ratio}
        made |= {"kind": "blend", "kv_transfer_params": {"lmcache": {"blend": blend}}}
    if chosen.random() < 0.1:
        made["num_steps"] = chosen.choice([1, 2, 3, 8])
    return made


class Counts:
    """Counts of answers, and of their blocks with blended KV."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        """Answers by the kind of request and of answer."""
        self.exact_blocks = self.blended_blocks_in_exact = self.unasked = self.approximate = 0
        self.largest = 0.0
        """Largest difference of KV in exact answers."""

    def add(self, kind: str, answer: Generated, differences: list[float]) -> None:
        """Count an answer to a request of this kind."""
        parameters = (answer.kv_transfer_params or {}).get("lmcache", {})
        is_blended = "blended" in parameters
        if answer.finish_reason == "abort":
            self.answers[f"{kind}, aborted"] += 1
            return
        self.answers[f"{kind}, {'blended' if is_blended else 'answered exactly'}"] += 1
        if is_blended:
            self.unasked += kind != "blend"
            self.approximate += max(differences, default=0) > CERTAIN
            return
        self.exact_blocks += len(differences)
        self.blended_blocks_in_exact += sum(not difference <= ROUNDING for difference in differences)
        self.largest = max([self.largest, *differences])

    def figures(self) -> list[Figure]:
        """Return the figures of all answers so far."""
        return [
            at_most("blended blocks in exact answers", self.blended_blocks_in_exact, "blocks", 0),
            at_most("blended answers to requests that did not ask", self.unasked, "answers", 0),
            of("blocks of exact answers, all compared", self.exact_blocks, "blocks"),
            of("largest difference of their KV from the KV of cold prompts", self.largest, "absolute"),
            of(f"blended answers whose KV differs by more than {CERTAIN}", self.approximate, "answers"),
        ]


def batches(prompts: list[Prompt]) -> Iterator[list[dict[str, Any]]]:
    """Yield all requests: mixed ones, and at the end each prompt once more under each salt, all exact."""
    chosen = random.Random(2)
    for first in range(0, REQUESTS, BATCH):
        yield [request(chosen, prompts) for _ in range(min(BATCH, REQUESTS - first))]
    for salt in dict.fromkeys(SALTS):
        yield [
            {"prompt": prompt.tokens, "cache_salt": salt, "kind": "exact, at the end", "max_tokens": 1}
            for prompt in prompts
        ]


def serve(engine: IsolationEngine, prompts: list[Prompt], counts: Counts) -> None:
    """Run all requests."""
    chosen = random.Random(3)
    for number, requests in enumerate(batches(prompts)):
        if requests[0]["kind"] == "exact, at the end":
            engine.scrub_kv()
        has_reset = number and chosen.random() < SHARE_OF_RESETS
        answers = engine.run(requests, reset_after=BATCH_STEPS // 3 if has_reset else 0)
        differences = engine.differences()
        for asked, answer in zip(requests, answers, strict=True):
            counts.add(asked["kind"], answer, differences[answer.request_id])
        if number % 5 == 4:
            print(
                f"{sum(counts.answers.values())} requests, {counts.blended_blocks_in_exact} blended blocks",
                flush=True,
            )


def run() -> Report:
    prompts, counts = pool(), Counts()
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
    options |= {"max_num_seqs": 16, "max_model_len": 2048, "kv_cache_memory_bytes": 14 << 20}
    with tempfile.TemporaryDirectory() as folder, SidecarProcess(memory_size="192Mi") as sidecar:
        settings = {"blend": "request", "blend_min_tokens": MIN_TOKENS}
        config = patient_config(sidecar.socket_path, **settings)
        with IsolationEngine(Path(folder) / "log", config, **options) as engine:
            sidecar.wait_attached(engine.wait_ready(900).run_short_request)
            engine.remember([prompt.tokens for prompt in prompts], "remembered")
            engine.differences()
            serve(engine, prompts, counts)
            preempted = engine.num_preemptions()
    kinds = "\n".join(f"{number:6} {kind}" for kind, number in sorted(counts.answers.items()))
    conditions = f"tiny Llama, {len(prompts)} prompts, {preempted} preemptions; requests:\n{kinds}"
    return Report("blend_isolation", conditions, counts.figures())
