"""What blending does to the tokens that a model says next, beside a full prefill of the same prompt.

Each segment's KV is computed alone and stored in an engine in memory; then BlendedModel answers with it, by
one selection of tokens after another.
"""

from __future__ import annotations

import sys
import time
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
from lmcache.engines.huggingface import BlendedModel
from testing.blend import prompts, texts
from testing.blend.texts import CountTokens
from testing.blend.tiny import engine_for
from testing.blend.weights import Pretrained

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5)
FULL, NAIVE = "full prefill", "naive reuse"
KINDS: dict[str, Callable[[float], Selection]] = {
    "largest deviation": LargestDeviation,
    "first tokens": FirstTokens,
    "most attended": MostAttended,
}
CACHE_GB = 0.3  # of a few prompts: what comes later takes the place of what is not asked for again


class Case(NamedTuple):
    """A prompt of documents and a question, as token ids."""

    segments: list[list[int]]
    num_compared: int
    """How many of its last tokens are looked at."""


@dataclass
class Comparison:
    """Of one way to compute prompts with their full prefills; a value per prompt."""

    divergence: list[float] = field(default_factory=list)
    """KL(full prefill || this), in nats, mean over the tokens compared."""
    agreement: list[float] = field(default_factory=list)
    """The share of them after which the likeliest next token is the same."""
    next_token: list[int] = field(default_factory=list)
    """The likeliest one after the prompt."""
    is_equal: list[bool] = field(default_factory=list)
    """Whether all logits are the same, bit for bit."""

    def add(self, logits: torch.Tensor, full: torch.Tensor) -> None:
        distributions = logits.log_softmax(-1), full.log_softmax(-1)
        sums = kl_div(*distributions, log_target=True, reduction="sum")
        self.divergence.append(sums.item() / len(full))
        self.agreement.append((logits.argmax(-1) == full.argmax(-1)).double().mean().item())
        self.next_token.append(int(logits[-1].argmax()))
        self.is_equal.append(torch.equal(logits, full))


def name_of(kind: str, ratio: float) -> str:
    return f"{kind}, {ratio:.0%}".replace("%", " %")


def selections(ratios: Sequence[float] = RATIOS) -> dict[str, Selection]:
    """Return all kinds with these ratios, by name, after naive reuse (which most are at 0 %)."""
    ranked = {
        name_of(kind, ratio): selection
        for kind, make in KINDS.items()
        for ratio in ratios
        if (selection := make(ratio)).layer != BEFORE_LAYERS or ratio > 0
    }
    return {NAIVE: NoTokens(), **ranked}


@torch.no_grad()
def compared(
    model: PreTrainedModel, cases: Sequence[Case], ways: dict[str, Selection], what: str = "prompts"
) -> dict[str, Comparison]:
    """Return how far each way's answers are from full prefill's, which is the first one."""
    found = {name: Comparison() for name in (FULL, *ways)}
    with engine_for(model, max_local_cache_size=CACHE_GB) as engine:
        blended = BlendedModel(model, engine)
        progress = Progress(what, len(cases))
        for segments, num_compared in cases:
            tokens = torch.tensor([[token for segment in segments for token in segment]])
            full = model(tokens, logits_to_keep=num_compared).logits[0]
            found[FULL].add(full, full)
            for name, blended.selection in ways.items():
                found[name].add(blended.prefill([segments], num_compared)[0].logits, full)
            progress.step()
        blended.close()
    return found


class Progress:
    """Lines on stderr: how much of what is done, a few times a minute."""

    def __init__(self, what: str, number: int) -> None:
        self._what, self._number, self._done = what, number, 0
        self._start = self._said = time.monotonic()

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._said > 15 or self._done == self._number:
            self._said = time.monotonic()
            seconds = self._said - self._start
            print(
                f"{self._what}: {self._done} of {self._number}, {seconds:.0f} s", file=sys.stderr, flush=True
            )


def counter(pretrained: Pretrained) -> CountTokens:
    return lambda text: len(pretrained.tokenizer(text)["input_ids"])


def real_cases(pretrained: Pretrained, number: int, num_tokens: int = 200, seed: int = 0) -> list[Case]:
    """Prompts of natural English; what is compared are the tokens of the question."""
    rng = np.random.default_rng(seed)
    made = [texts.prompt(rng, counter(pretrained), num_tokens) for _ in range(number)]
    ids = [
        [pretrained.tokenizer(text)["input_ids"] for text in (*one.documents, one.question)] for one in made
    ]
    return [Case(segments, len(segments[-1])) for segments in ids]


class Fact(NamedTuple):
    """What a prompt of the little model asks for."""

    answer: int
    is_spread: bool
    """Whether it takes another document than the one that the fact is in."""


def little_cases(number: int, seed: int = 1) -> tuple[list[Case], list[Fact]]:
    """Prompts in the little model's language; what is compared is the answer."""
    rng = np.random.default_rng(seed)
    cases, facts = [], []
    for _ in range(number):
        documents = prompts.documents(rng)
        answers = prompts.answers([token for document in documents for token in document])
        key = int(rng.choice(list(answers)))
        (alone,) = (said[key] for said in map(prompts.answers, documents) if key in said)
        cases.append(Case([*documents, [prompts.ASK, key]], 1))
        facts.append(Fact(answers[key], alone != answers[key]))
    return cases, facts
