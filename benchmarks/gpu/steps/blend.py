"""Blending of documents in another order, compared with a full prefill."""

from __future__ import annotations

import torch

from benchmarks.gpu.llama import configuration, device, random_model, timed
from benchmarks.gpu.results import Results, held
from benchmarks.gpu.scale import Scale
from lmcache.blend.selection import AllTokens, LargestDeviation, MostAttended, Selection
from lmcache.cache_engine import LMCacheEngine
from lmcache.huggingface import BlendedModel, metadata_of

_DOCUMENTS = 3
_RATIO = 0.15
_QUESTION_TOKENS = 32
_MAX_DIFFERENCE = 0.1
"""Bar for logits if every token is computed, relative to a full prefill: kernels of other shapes round
differently in bfloat16."""


def run(results: Results, scale: Scale) -> None:
    model = random_model(scale.shape, 2 * max(scale.prompt_tokens))
    num_tokens = scale.prompt_tokens[0]
    documents = [_tokens(scale, num_tokens // _DOCUMENTS) for _ in range(_DOCUMENTS)]
    question = _tokens(scale, _QUESTION_TOKENS)
    section = results.section(
        f"Blending of {num_tokens} tokens",
        ("selection", "time to the first token", "/ full prefill", "difference of logits", "bar"),
        f"{_DOCUMENTS} documents whose KV was computed alone, in another order. The weights are random, so"
        " differences of logits say nothing about answers unless all tokens are computed.",
    )
    prompt = [*reversed(documents), question]
    with torch.no_grad():
        whole = torch.cat(prompt)[None].to(device())
        full, expected = min((timed(lambda: model(whole).logits[0, -1].float()) for _ in range(2)), key=_time)
        section.add("none: full prefill", f"{full:.0f} ms", "1", "", "")
        for selection in (AllTokens(), LargestDeviation(_RATIO), MostAttended(_RATIO)):
            taken, logits = _blended(scale, model, selection, documents, prompt)
            difference = float((logits - expected).norm() / expected.norm())
            bar = held(difference, _MAX_DIFFERENCE) if isinstance(selection, AllTokens) else ""
            name = type(selection).__name__
            section.add(name, f"{taken:.0f} ms", f"{taken / full:.3f}", f"{difference:.4f}", bar)
            if "not held" in bar:
                results.problem(
                    f"blending that computes everything differs from a full prefill by {difference:.3f}",
                    "blended answers are wrong on this GPU: don't use CacheBlend there",
                )


def _time(timed_result: tuple[float, torch.Tensor]) -> float:
    return timed_result[0]


def _tokens(scale: Scale, number: int) -> torch.Tensor:
    return torch.randint(4, scale.shape.vocab, (number,))


def _blended(
    scale: Scale,
    model: torch.nn.Module,
    selection: Selection,
    documents: list[torch.Tensor],
    prompt: list[torch.Tensor],
) -> tuple[float, torch.Tensor]:
    """Return the milliseconds of a blended prefill whose documents are stored, and its last logits."""
    gib = 1.5 * sum(map(len, prompt)) * 2 * scale.shape.token_bytes / 2**30 + 0.1
    config = configuration(device(), scale.chunk_tokens, gib, enable_blending=True, blend_min_tokens=0)
    engine = LMCacheEngine(config, metadata_of(model, "random-llama", scale.chunk_tokens))
    try:
        with BlendedModel(model, engine, selection=selection) as blended:
            blended.precompute(documents)
            blended.prefill([prompt])  # warm up
            taken, prefilled = timed(lambda: blended.prefill([prompt]))
            return taken, prefilled[0].logits[-1].float()
    finally:
        engine.close()
