"""The library with a model of transformers: cold prompts, hits, and the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.llama import configuration, device, random_model, timed
from benchmarks.gpu.results import Results, Section
from benchmarks.gpu.scale import Scale
from lmcache.cache_engine import LMCacheEngine
from lmcache.engines.huggingface import CachedModel, metadata_of
from testing.child_process import wait_until

_ROUNDS = 2
"""Runs of a prompt without the cache, and of a hit. The fastest is reported."""


def run(results: Results, scale: Scale) -> None:
    model = random_model(scale.shape, 2 * max(scale.prompt_tokens))
    section = results.section(
        "The library with a model of transformers",
        ("chunks in", "tokens", "no cache", "cold, with the store", "hit", "hit / no cache", "retrieve"),
        f"Model of the shape {scale.shape} with random weights in bfloat16. Times are until the first token.",
    )
    with torch.no_grad():
        model.generate(_prompt(scale, scale.prompt_tokens[0]), max_new_tokens=1, do_sample=False)  # warm up
        for place in dict.fromkeys(("cpu", device())):
            gib = 1.2 * (2 * scale.shape.token_bytes * sum(scale.prompt_tokens)) / 2**30
            config = configuration(place, scale.chunk_tokens, gib)
            engine = LMCacheEngine(config, metadata_of(model, "random-llama", scale.chunk_tokens))
            for num_tokens in scale.prompt_tokens:
                _measure(results, section, scale, engine, model, num_tokens, place)
            engine.close()


def _prompt(scale: Scale, num_tokens: int) -> torch.Tensor:
    return torch.randint(4, scale.shape.vocab, (1, num_tokens), device=device())


def _measure(
    results: Results, section: Section, scale: Scale, engine: Any, model: Any, num_tokens: int, place: str
) -> None:
    cached = CachedModel(model, engine)
    prompt = _prompt(scale, num_tokens + 1)  # a hit computes one token

    def answer(run_model: Callable[..., Any]) -> tuple[float, torch.Tensor]:
        return timed(lambda: run_model(prompt, max_new_tokens=1, do_sample=False))

    plain = [answer(model.generate) for _ in range(_ROUNDS)]
    stored, first = answer(cached.generate)
    wait_until(lambda: engine.lookup(prompt[0].cpu()) >= num_tokens, timeout=20, what="the prompt is stored")
    before = engine.hit_tokens_count
    hits = [answer(cached.generate) for _ in range(_ROUNDS)]
    what = f"{num_tokens} tokens with chunks in {place}"
    meaning = "the library's cache gives wrong or no hits on this GPU; the sidecar is not affected"
    if (num_hits := engine.hit_tokens_count - before) < _ROUNDS * num_tokens:
        results.problem(f"{what}: {num_hits} tokens were hits, not {_ROUNDS * num_tokens}", meaning)
    for _, got in [(0.0, first), *hits]:
        if not torch.equal(got, plain[0][1]):
            results.problem(f"{what}: the answer differs from the one without the cache", meaning)
    load, _ = timed(lambda: engine.retrieve(prompt[0].cpu()))
    speed = f"{num_tokens * scale.shape.token_bytes / load / 1e6:.1f} GB/s"
    without, hit = (min(taken for taken, _ in runs) for runs in (plain, hits))
    times = (f"{taken:.0f} ms" for taken in (without, stored, hit))
    section.add(place, str(num_tokens), *times, f"{hit / without:.3f}", speed)
