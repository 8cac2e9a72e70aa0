"""Effect of blending on the tokens that a model predicts, compared with a full prefill of the same prompt.

The KV of each segment is computed alone and stored in an engine in memory. BlendedModel then answers with it,
with each selection of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from lmcache.blend.selection import (
    BEFORE_LAYERS,
    FirstTokens,
    LargestDeviation,
    MostAttended,
    NoTokens,
    Selection,
)
from lmcache.huggingface import BlendedModel
from testing.blend import prompts
from testing.blend.tiny import engine_for

FULL, NAIVE = "full prefill", "naive reuse"
KINDS: dict[str, Callable[[float], Selection]] = {
    "largest deviation": LargestDeviation,
    "first tokens": FirstTokens,
    "most attended": MostAttended,
}
CACHE_GB = 0.3  # holds a few prompts: later prompts replace earlier ones, which are not used again


class Case(NamedTuple):
    """A prompt of documents and a question, as token ids."""

    segments: list[list[int]]
    num_compared: int
    """Number of last tokens that are compared."""


@dataclass
class Comparison:
    """Comparison of one way to compute prompts with a full prefill. Lists have one value per prompt."""

    divergence: list[float] = field(default_factory=list)
    """KL(full prefill || this way) in nats, mean over the compared tokens."""
    next_token: list[int] = field(default_factory=list)
    """The most likely token after the prompt."""
    is_equal: list[bool] = field(default_factory=list)
    """Whether all logits are equal, bit for bit."""

    def add(self, logits: torch.Tensor, full: torch.Tensor) -> None:
        distributions = logits.log_softmax(-1), full.log_softmax(-1)
        sums = kl_div(*distributions, log_target=True, reduction="sum")
        self.divergence.append(sums.item() / len(full))
        self.next_token.append(int(logits[-1].argmax()))
        self.is_equal.append(torch.equal(logits, full))


def name_of(kind: str, ratio: float) -> str:
    return f"{kind}, {ratio:.0%}".replace("%", " %")


def selections(ratios: Sequence[float]) -> dict[str, Selection]:
    """All kinds of selections with these ratios, by name, after naive reuse. Most kinds equal it at 0 %."""
    ranked = {
        name_of(kind, ratio): selection
        for kind, make in KINDS.items()
        for ratio in ratios
        if (selection := make(ratio)).layer != BEFORE_LAYERS or ratio > 0
    }
    return {NAIVE: NoTokens(), **ranked}


@torch.no_grad()
def compared(
    model: PreTrainedModel, cases: Sequence[Case], ways: dict[str, Selection]
) -> dict[str, Comparison]:
    """Compare the answers of each way with those of full prefill, which is the first way."""
    comparisons = {name: Comparison() for name in (FULL, *ways)}
    with engine_for(model, max_local_cache_size=CACHE_GB) as engine:
        blended = BlendedModel(model, engine)
        for segments, num_compared in cases:
            tokens = torch.tensor([[token for segment in segments for token in segment]])
            full = model(tokens, logits_to_keep=num_compared).logits[0]
            comparisons[FULL].add(full, full)
            for name, blended.selection in ways.items():
                comparisons[name].add(blended.prefill([segments], num_compared)[0].logits, full)
        blended.close()
    return comparisons


class Fact(NamedTuple):
    """The fact that a prompt of the small model asks for."""

    answer: int
    is_spread: bool
    """Whether the answer needs another document than the one with the fact."""


def little_cases(
    number: int, seed: int = 1, size: prompts.Size = prompts.FULL
) -> tuple[list[Case], list[Fact]]:
    """Prompts in the small model's language. The answer is compared."""
    rng = np.random.default_rng(seed)
    cases, facts = [], []
    for _ in range(number):
        documents = prompts.documents(rng, size)
        answers = prompts.answers([token for document in documents for token in document])
        key = int(rng.choice(list(answers)))
        (alone,) = (values[key] for values in map(prompts.answers, documents) if key in values)
        cases.append(Case([*documents, [prompts.ASK, key]], 1))
        facts.append(Fact(answers[key], alone != answers[key]))
    return cases, facts
