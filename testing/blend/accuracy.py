"""Share of questions that a real model answers right, from blended KV and from a full prefill."""

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
"""A function from segments to the logits of the last token and the KV."""


@dataclass
class Answers:
    """Share of right answers, for each sheet."""

    within: list[float] = field(default_factory=list)
    """Share of questions whose answer is in one document."""
    spread: list[float] = field(default_factory=list)
    """Share of questions that need two documents."""


@torch.no_grad()
def answer_sheets(
    pretrained: Pretrained, num_sheets: int, ways: dict[str, Selection], seed: int = 0
) -> dict[str, Answers]:
    """Answer the same sheets in each way. Full prefill is the first way."""
    model, rng = pretrained.model, np.random.default_rng(seed)
    results = {name: Answers() for name in (FULL, *ways)}
    with engine_for(model, max_local_cache_size=CACHE_GB) as engine:
        blended = BlendedModel(model, engine)
        progress = Progress("sheets of questions", num_sheets)
        for _ in range(num_sheets):
            sheet = questions.sheet(rng, counter(pretrained))
            ask = partial(_answer, pretrained, sheet)
            ask(results[FULL], partial(_full, model))
            for name, blended.selection in ways.items():
                ask(results[name], partial(_blended, blended), not blended.selection.reads_attention)
            progress.step()
        blended.close()
    return results


def _full(model: PreTrainedModel, segments: list[Tokens]) -> tuple[torch.Tensor, DynamicCache]:
    tokens = torch.tensor([[token for segment in segments for token in segment]])
    output = model(tokens, logits_to_keep=1)
    return output.logits[0, -1], output.past_key_values


def _blended(model: BlendedModel, segments: list[Tokens]) -> tuple[torch.Tensor, DynamicCache]:
    (prefill,) = model.prefill([segments])
    return prefill.logits[-1], prefill.cache


def _answer(
    pretrained: Pretrained,
    sheet: questions.Sheet,
    answers: Answers,
    prefill: Prefill,
    is_shared: bool = True,
) -> None:
    """Answer a sheet. ``is_shared``: one prefill serves all questions, as it does not depend on them."""

    def ids(text: str) -> Tokens:
        tokens: Tokens = pretrained.tokenizer(text)["input_ids"]
        return tokens

    prompts = [ids(text) for row in sheet.questions for text in row]
    documents = list(map(ids, sheet.documents))
    if is_shared:
        last_logits = _after_one_prefill(pretrained.model, documents, prompts, prefill)
    else:
        last_logits = [prefill([*documents, question])[0] for question in prompts]
    logits = torch.stack(last_logits).view(len(sheet.questions), questions.NUM_PEOPLE, -1)
    candidates = torch.tensor([[ids(f" {answer}")[0] for answer in row] for row in sheet.answers])
    log_probabilities = torch.stack(
        [of_people.log_softmax(-1)[:, row] for of_people, row in zip(logits, candidates, strict=True)]
    )
    is_right = questions.is_right(log_probabilities.numpy())
    within, spread = answers_of(is_right)
    answers.within.append(within)
    answers.spread.append(spread)


def answers_of(is_right: np.ndarray) -> tuple[float, float]:
    """Shares of right answers in ``[relation, person]``: within one document, and across two."""
    within, spread = np.split(is_right, [questions.NUM_NAMED], axis=1)
    return float(within.mean()), float(spread.mean())


def _after_one_prefill(
    model: PreTrainedModel, documents: list[Tokens], prompts: Sequence[Tokens], prefill: Prefill
) -> list[torch.Tensor]:
    """Prefill the documents and the common start of all questions, then continue with each ending."""
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    beginning = [tokens[0] for tokens in same]
    cache = prefill([*documents, beginning])[1]
    endings = [torch.tensor(question[len(beginning) :]) for question in prompts]
    cache.batch_repeat_interleave(len(endings))
    padded = pad_sequence(endings, batch_first=True)  # no token attends to the padding, which follows it
    logits = model(padded, past_key_values=cache).logits
    return [row[len(ending) - 1] for row, ending in zip(logits, endings, strict=True)]
