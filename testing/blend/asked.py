"""How many questions a real model answers right from blended KV, and from a full prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from lmcache.blend.selection import Selection
from lmcache.engines.huggingface import BlendedModel
from testing.blend import questions
from testing.blend.experiment import CACHE_GB, FULL, Progress, counter
from testing.blend.tiny import engine_for
from testing.blend.weights import Pretrained

Tokens = list[int]
Prefill = Callable[[list[Tokens]], tuple[torch.Tensor, DynamicCache]]
"""Segments to the last token's logits and the KV."""


@dataclass
class Answers:
    """The share of right ones, per sheet."""

    within: list[float] = field(default_factory=list)
    """Of the questions whose answer lies in one document."""
    spread: list[float] = field(default_factory=list)
    """Of those that take two."""


@torch.no_grad()
def answered(
    pretrained: Pretrained, num_sheets: int, ways: dict[str, Selection], seed: int = 0
) -> dict[str, Answers]:
    """Return how each way answers the same sheets; full prefill is the first one."""
    model, rng = pretrained.model, np.random.default_rng(seed)
    found = {name: Answers() for name in (FULL, *ways)}
    with engine_for(model, max_local_cache_size=CACHE_GB) as engine:
        blended = BlendedModel(model, engine)
        progress = Progress("sheets of questions", num_sheets)
        for _ in range(num_sheets):
            sheet = questions.sheet(rng, counter(pretrained))
            ask = partial(_answer, pretrained, sheet)
            ask(found[FULL], partial(_full, model))
            for name, blended.selection in ways.items():
                ask(found[name], partial(_blended, blended), not blended.selection.reads_attention)
            progress.step()
        blended.close()
    return found


def _full(model: PreTrainedModel, segments: list[Tokens]) -> tuple[torch.Tensor, DynamicCache]:
    tokens = torch.tensor([[token for segment in segments for token in segment]])
    output = model(tokens, logits_to_keep=1)
    return output.logits[0, -1], output.past_key_values


def _blended(model: BlendedModel, segments: list[Tokens]) -> tuple[torch.Tensor, DynamicCache]:
    (found,) = model.prefill([segments])
    return found.logits[-1], found.cache


def _answer(
    pretrained: Pretrained,
    sheet: questions.Sheet,
    answers: Answers,
    prefill: Prefill,
    is_shared: bool = True,
) -> None:
    """Answer a sheet. ``is_shared``: one prefill serves all questions, as it does not depend on which one
    is asked."""

    def ids(text: str) -> Tokens:
        tokens: Tokens = pretrained.tokenizer(text)["input_ids"]
        return tokens

    asked = [ids(text) for row in sheet.questions for text in row]
    documents = list(map(ids, sheet.documents))
    if is_shared:
        said = _after_one_prefill(pretrained.model, documents, asked, prefill)
    else:
        said = [prefill([*documents, question])[0] for question in asked]
    logits = torch.stack(said).view(len(sheet.questions), questions.NUM_PEOPLE, -1)
    candidates = torch.tensor([[ids(f" {answer}")[0] for answer in row] for row in sheet.answers])
    log_probabilities = torch.stack(
        [of_people.log_softmax(-1)[:, row] for of_people, row in zip(logits, candidates, strict=True)]
    )
    is_right = questions.is_right(log_probabilities.numpy())
    within, spread = answers_of(is_right)
    answers.within.append(within)
    answers.spread.append(spread)


def answers_of(is_right: np.ndarray) -> tuple[float, float]:
    """Return the shares of right ones of ``[relation, person]``: within a document, across two."""
    within, spread = np.split(is_right, [questions.NUM_NAMED], axis=1)
    return float(within.mean()), float(spread.mean())


def _after_one_prefill(
    model: PreTrainedModel, documents: list[Tokens], asked: Sequence[Tokens], prefill: Prefill
) -> list[torch.Tensor]:
    """Prefill the documents and the beginning that all questions have, then go on with all their rests."""
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*asked, strict=False))
    beginning = [tokens[0] for tokens in same]
    cache = prefill([*documents, beginning])[1]
    rests = [torch.tensor(question[len(beginning) :]) for question in asked]
    cache.batch_repeat_interleave(len(rests))
    padded = pad_sequence(rests, batch_first=True)  # behind: no token sees what comes after it
    logits = model(padded, past_key_values=cache).logits
    return [row[len(rest) - 1] for row, rest in zip(logits, rests, strict=True)]
