"""The library with a model of transformers: cold prompts, hits, and the same answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.gpu.llama import configuration, device, random_model, timed
from benchmarks.gpu.results import Results, Section
from benchmarks.gpu.scale import Scale
from lmcache.cache_engine import LMCacheEngine
from lmcache.huggingface import CachedModel, metadata_of
from testing.child_process import wait_until

_ROUNDS = 2
"""Runs of a prompt without the cache, and of a hit. The fastest is reported."""
_MAX_LOGIT_GAP = 0.05
"""Largest distance of the answer's logit from the best logit, as a share of the range of all logits. Rounding
in bfloat16 swaps near logits. Wrong KV gives a token from the middle of the range."""


@dataclass(frozen=True)
class Reference:
    """A prompt, and what the model computes for it without the cache."""

    prompt: torch.Tensor
    """Token ids, ``[1, num_tokens + 1]``. A hit computes the last token."""
    milliseconds: float
    """Time to the first token."""
    logits: torch.Tensor
    """Logits ``[vocab]`` of the last token, computed alone, as a hit does."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV a hit loads."""
        return self.prompt.shape[1] - 1


def run(results: Results, scale: Scale) -> None:
    model = random_model(scale.shape, 2 * max(scale.prompt_tokens))
    section = results.section(
        "The library with a model of transformers",
        ("chunks in", "tokens", "no cache", "cold, with the store", "hit", "hit / no cache", "retrieve"),
        f"Model of the shape {scale.shape} with random weights in bfloat16. Times are until the first token.",
    )
    with torch.no_grad():
        _answer(model, _prompt(scale, scale.prompt_tokens[0]))  # warm up
        references = [_reference(model, _prompt(scale, tokens + 1)) for tokens in scale.prompt_tokens]
        for place in dict.fromkeys(("cpu", device())):
            gib = 1.2 * (2 * scale.shape.token_bytes * sum(scale.prompt_tokens)) / 2**30
            config = configuration(place, scale.chunk_tokens, gib)
            engine = LMCacheEngine(config, metadata_of(model, "random-llama", scale.chunk_tokens))
            cached = CachedModel(model, engine)
            for reference in references:
                _measure(results, section, scale, cached, reference, place)
            engine.close()


def _prompt(scale: Scale, num_tokens: int) -> torch.Tensor:
    return torch.randint(4, scale.shape.vocab, (1, num_tokens), device=device())


def _answer(model: Any, prompt: torch.Tensor) -> tuple[float, int]:
    """Return milliseconds to the first token, and the token."""
    taken, tokens = timed(lambda: model.generate(prompt, max_new_tokens=1, do_sample=False))
    return taken, int(tokens[0, -1])


def _reference(model: Any, prompt: torch.Tensor) -> Reference:
    cache = DynamicCache()
    model(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
    logits = model(prompt[:, -1:], past_key_values=cache).logits[0, -1].float()
    del cache
    return Reference(prompt, min(_answer(model, prompt)[0] for _ in range(_ROUNDS)), logits)


def _measure(
    results: Results, section: Section, scale: Scale, cached: CachedModel, reference: Reference, place: str
) -> None:
    engine, prompt, num_tokens = cached.engine, reference.prompt, reference.num_tokens
    stored, first = _answer(cached, prompt)
    wait_until(lambda: engine.lookup(prompt[0].cpu()) >= num_tokens, timeout=20, what="the prompt is stored")
    before = engine.hit_tokens_count
    hits = [_answer(cached, prompt) for _ in range(_ROUNDS)]
    what = f"{num_tokens} tokens with chunks in {place}"
    meaning = "the library's cache gives wrong or no hits on this GPU; the sidecar is not affected"
    if (num_hits := engine.hit_tokens_count - before) < _ROUNDS * num_tokens:
        results.problem(f"{what}: {num_hits} tokens were hits, not {_ROUNDS * num_tokens}", meaning)
    for kind, token in (("cold prompt", first), *(("hit", token) for _, token in hits)):
        if not (gap := logit_gap(reference.logits, token)) <= _MAX_LOGIT_GAP:  # also if it is not a number
            results.problem(
                f"{what}: the logit of the {kind}'s answer is {gap:.0%} of the range below the best", meaning
            )
    load, _ = timed(lambda: engine.retrieve(prompt[0].cpu()))
    speed = f"{num_tokens * scale.shape.token_bytes / load / 1e6:.1f} GB/s"
    without, hit = reference.milliseconds, min(taken for taken, _ in hits)
    times = (f"{taken:.0f} ms" for taken in (without, stored, hit))
    section.add(place, str(num_tokens), *times, f"{hit / without:.3f}", speed)


def logit_gap(logits: torch.Tensor, token: int) -> float:
    """Return the distance of a token's logit from the best one, as a share of the range of all logits."""
    return float((logits.max() - logits[token]) / (logits.max() - logits.min()))
