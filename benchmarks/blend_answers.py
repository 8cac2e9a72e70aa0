"""Measure answers to blended prompts in vLLM: facts from documents, and later questions of a conversation.

- **Facts**: the small model (``testing/blend/train.py``) and SmolLM2-135M (``testing/blend/questions.py``)
  answer the same questions in each way. Each question is the first one after its documents.
- **Conversations**: SmolLM2-135M is asked about each of three documents, one after the other. The prompt of a
  question has all earlier questions and their answers. All ways get the answers of the full prefill.

The environment variables FACTS (of the small model), SHEETS (of 8 questions) and CONVERSATIONS set the amount
of work. 0 skips a part.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.blend_engine import BlendEngine
from benchmarks.blend_vllm import NAIVE, RATIO, SELECTIONS, Prompt, announce, blend, engine_of
from benchmarks.report import Figure, Report, at_most, of, table
from testing.blend import prompts, questions, texts
from testing.blend.experiment import little_cases
from testing.blend.little import little_model
from testing.blend.weights import smollm2

FACTS, SHEETS, CONVERSATIONS = (
    int(os.environ.get(name, default))
    for name, default in (("FACTS", 600), ("SHEETS", 60), ("CONVERSATIONS", 40))
)
FULL, AGAIN = "full prefill", "attended, blended anew"
WAYS = NAIVE, *SELECTIONS
LARGEST_LOSS = 2.0
"""Largest loss of accuracy with ``attended`` and ``deviation``, in percentage points."""
ANSWER_TOKENS = 32
MAX_MODEL_LEN = 1024
MIN_TOKENS = 32
"""Documents are shorter than in prompts that are worth blending."""
WHOLE_BLOCKS = prompts.Size(num_facts=5, num_words=53)
"""A document of the small model that fills two blocks, so that all its tokens can be reused."""

Encode = Callable[[str], list[int]]
_numbers = itertools.count(1)


class Answers(NamedTuple):
    """Shares of right answers of one way, by prompt or sheet. NaN: it has no such question."""

    one_document: list[float]
    """Questions whose answer is in one document."""
    two_documents: list[float]
    """Questions that need two documents."""
    all_questions: list[float]


def separate_ratio() -> float:
    """Return a ratio with which a prompt is blended from stored KV: vLLM's own cache keeps ratios apart."""
    return RATIO + 1e-9 * next(_numbers)


def encoder(model: Path) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    return encode


def scores(
    engine: BlendEngine, made: Prompt, salts: tuple[str, str], candidates: Sequence[int]
) -> dict[str, list[float]]:
    """Return the log-probabilities of candidate answers of each way. ``salts``: of full prefills, and of the
    documents.
    """
    full, documents = salts
    engine.prefill({"prompt": made.tokens, "cache_salt": full}, 1, FULL)
    for name in WAYS:
        blend(engine, made, name, documents, 1, separate_ratio())
    return {name: engine.scores(name, candidates) for name in (FULL, *WAYS)}


def little_answers(engine: BlendEngine) -> dict[str, Answers]:
    """Ask the small model."""
    results = {name: Answers([], [], []) for name in (FULL, *WAYS)}
    candidates = range(prompts.NO_VALUE + 1, prompts.FIRST_WORD)
    for case, fact in zip(*little_cases(FACTS, size=WHOLE_BLOCKS), strict=True):
        made = Prompt(case.segments[:-1], case.segments[-1])
        salts = f"full {next(_numbers)}", announce(engine, made)
        for name, values in scores(engine, made, salts, candidates).items():
            is_right = float(candidates[int(np.argmax(values))] == fact.answer)
            results[name].one_document.append(float("nan") if fact.is_spread else is_right)
            results[name].two_documents.append(is_right if fact.is_spread else float("nan"))
            results[name].all_questions.append(is_right)
    return results


def sheet_answers(engine: BlendEngine, encode: Encode) -> dict[str, Answers]:
    """Ask SmolLM2 the questions of sheets."""
    results = {name: Answers([], [], []) for name in (FULL, *WAYS)}
    rng = np.random.default_rng(0)
    for _ in range(SHEETS):
        sheet = questions.sheet(rng, lambda text: len(encode(text)))
        documents = list(map(encode, sheet.documents))
        salts = f"full {next(_numbers)}", announce(engine, Prompt(documents, []))
        by_way: dict[str, list[list[list[float]]]] = {name: [] for name in results}
        for asked, answers in zip(sheet.questions, sheet.answers, strict=True):
            candidates = [encode(f" {answer}")[0] for answer in answers]
            of_people = [scores(engine, Prompt(documents, encode(text)), salts, candidates) for text in asked]
            for name, values in by_way.items():
                values.append([of_person[name] for of_person in of_people])
        for name, values in by_way.items():
            is_right = questions.is_right(np.array(values))
            within, across = np.split(is_right, [questions.NUM_NAMED], axis=1)
            for column, part in zip(results[name], (within, across, is_right), strict=True):
                column.append(float(part.mean()))
    return results


def mean_of(values: Sequence[float], scale: float = 1) -> tuple[float, float]:
    """Return the mean and its standard error. NaN is left out."""
    numbers = [scale * value for value in values if value == value]
    return statistics.mean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5


def answer_figures(what: str, results: dict[str, Answers]) -> tuple[str, list[Figure]]:
    rows, figures = [], []
    for name, answers in results.items():
        lost = [
            full - other
            for full, other in zip(results[FULL].all_questions, answers.all_questions, strict=True)
        ]
        loss, error = mean_of(lost, 100)
        shares = ["{:.1f} ± {:.1f}".format(*mean_of(values, 100)) for values in answers]
        rows.append((name, *shares, "" if name == FULL else f"{loss:.1f} ± {error:.1f}"))
        text = f"right answers, {what}: full prefill's minus those of {name}, without sign"
        if name in ("attended", "deviation"):
            figures.append(at_most(text, abs(loss), "points", LARGEST_LOSS))
        elif name != FULL:
            figures.append(of(text, abs(loss), "points"))
    head = "way", "right: one document, %", "right: two, %", "right: all, %", "lost, points"
    return f"Right answers, {what}:\n{table(head, rows)}", figures


def conversations(engine: BlendEngine, encode: Encode) -> Iterator[tuple[int, str, float, float]]:
    """Yield the turn, the way, KL in nats and same next tokens of each question."""
    rng = np.random.default_rng(1)
    for _ in range(CONVERSATIONS):
        made = texts.conversation(rng, lambda text: len(encode(text)))
        documents, history = list(map(encode, made[0])), list[int]()
        salt, cold = announce(engine, Prompt(documents, [])), f"full {next(_numbers)}"
        for turn, question in enumerate(map(encode, made[1]), 1):
            asked, compared = Prompt(documents, history + question), len(question)
            engine.prefill({"prompt": asked.tokens, "cache_salt": cold}, compared, FULL)
            for name in WAYS:
                blended = blend(engine, asked, name, salt, compared).blended or {}
                if (turn > 1) != bool(blended["cached"]):
                    raise RuntimeError(f"turn {turn}: blended blocks must be reused later only: {blended}")
                yield turn, name, *engine.compare(FULL, name)
            blend(engine, asked, "attended", salt, compared, separate_ratio())
            yield turn, AGAIN, *engine.compare(FULL, "attended")
            (answer,) = engine.generate(asked.tokens, max_tokens=ANSWER_TOKENS, cache_salt=cold)
            history = [*asked.question, *answer.tokens]


def conversation_figures(samples: Iterator[tuple[int, str, float, float]]) -> tuple[str, list[Figure]]:
    samples_of: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn, name, *values in samples:
        samples_of.setdefault((name, turn), []).append((values[0], values[1]))
    means: Mapping[tuple[str, int], tuple[float, float]] = {
        way: mean_of([divergence for divergence, _ in values]) for way, values in samples_of.items()
    }
    rows, figures = [], []
    for (name, turn), pairs in sorted(samples_of.items(), key=lambda each: each[0][1]):
        (mean, error), same = means[name, turn], 100 * statistics.mean(each for _, each in pairs)
        share = 100 * mean / means[NAIVE, turn][0]
        cells = f"{mean:.4f} ± {error:.4f}", f"{share:.1f}", f"{same:.1f}"
        rows.append((str(turn), name, *cells))
        if name != NAIVE:
            figures.append(of(f"KL of question {turn}, of naive reuse: {name}", share, "%"))
    head = "question", "way", "KL, nats", "of naive, %", "same next token, %"
    return f"{CONVERSATIONS} conversations with documents of 200 tokens:\n{table(head, rows)}", figures


def run() -> Report:
    parts: list[tuple[str, list[Figure]]] = []

    def add(part: tuple[str, list[Figure]]) -> None:
        parts.append(part)
        print(part[0], flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "blend_min_tokens": MIN_TOKENS}
        if FACTS:
            with engine_of(folder, little_model(), **options) as engine:
                add(answer_figures(f"small model, {FACTS} questions", little_answers(engine)))
        if SHEETS or CONVERSATIONS:
            model = smollm2()
            with engine_of(folder, model, **options) as engine:
                encode = encoder(model)
                if SHEETS:
                    what = f"SmolLM2-135M, {SHEETS} sheets of 8 questions"
                    add(answer_figures(what, sheet_answers(engine, encode)))
                if CONVERSATIONS:
                    add(conversation_figures(conversations(engine, encode)))
    conditions = f"{RATIO:.0%} of the reused tokens are recomputed; documents are computed alone"
    texts_of_parts = [text for text, _ in parts]
    figures = [figure for _, of_part in parts for figure in of_part]
    return Report("blend_answers", "\n\n".join([conditions, *texts_of_parts]), figures)
