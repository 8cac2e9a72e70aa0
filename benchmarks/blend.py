"""Measure blending: KL divergence, next tokens, answers and time, by selection and ratio.

The models are SmolLM2-135M (30 layers, real weights in float32) and a small model that was trained for this
benchmark. The environment variables PROMPTS, SHEETS (of eight questions each) and ROUNDS (of timing) set the
amount of work. 0 skips a part.
"""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.report import Figure, Report, at_least, at_most, of, paired, spread, table
from lmcache.blend.selection import AllTokens, Selection
from testing.blend.accuracy import Answers, answer_sheets
from testing.blend.experiment import (
    FULL,
    KINDS,
    NAIVE,
    RATIOS,
    Case,
    Comparison,
    Fact,
    compared,
    little_cases,
    name_of,
    real_cases,
    selections,
)
from testing.blend.timing import Seconds, timed
from testing.blend.train import trained_model
from testing.blend.weights import smollm2

PROMPTS = int(os.environ.get("PROMPTS", "40"))
SHEETS = int(os.environ.get("SHEETS", "24"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
LITTLE_PROMPTS = 200
EXACT_PROMPTS = 8
"""Number of prompts for the check that ratio 1 is exact."""
ANSWERED_RATIOS = (0.05, 0.15, 0.25, 0.5)
RATIO_OF_BARS = 0.15
LARGEST_SHARE, LEAST_AGREEMENT, LARGEST_TIME, LARGEST_OVERHEAD = 12.0, 83.0, 45.0, 20.0
"""Limits in per cent, at this ratio."""
Compared = dict[str, Comparison]


class Estimate(NamedTuple):
    """A value with its standard error over prompts."""

    value: float
    error: float

    def shown(self, scale: float = 1, digits: int = 1) -> str:
        return f"{scale * self.value:.{digits}f} ± {scale * self.error:.{digits}f}"


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean with its standard error. Raises ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no standard error: at least 2 are needed")
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5))


def share(values: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Return the quotient of two means over the same prompts, with its first-order error (delta method)."""
    quotient = float(np.mean(values) / np.mean(wholes))
    left_over = [value - quotient * whole for value, whole in zip(values, wholes, strict=True)]
    return Estimate(quotient, mean(left_over).error / float(np.mean(wholes)))


def run() -> Report:
    figures: list[Figure] = []
    texts: list[str] = []
    series: dict[str, object] = {}
    pictures = {}
    pretrained = smollm2()
    if PROMPTS:
        cases = real_cases(pretrained, PROMPTS)
        comparisons = compared(pretrained.model, cases, selections(), "SmolLM2-135M")
        exact = compared(pretrained.model, cases[:EXACT_PROMPTS], _everything(), "SmolLM2-135M, all computed")
        texts.append(_quality("SmolLM2-135M", cases, comparisons))
        figures += [*_exact_figures("SmolLM2-135M", exact), *_quality_figures(comparisons)]
        pictures["divergence"] = plot(comparisons)
        series["SmolLM2-135M"] = {name: asdict(result) for name, result in comparisons.items()}
        little, facts = little_cases(LITTLE_PROMPTS)
        model = trained_model()
        comparisons = compared(model, little, selections(), "little model")
        exact = compared(model, little[: 4 * EXACT_PROMPTS], _everything(), "little model, all computed")
        texts.append(_quality("little model", little, comparisons, _answers(comparisons, facts)))
        figures += [*_exact_figures("little model", exact), *_little_figures(comparisons)]
        series["little model"] = {name: asdict(result) for name, result in comparisons.items()}
    if SHEETS:
        answers = answer_sheets(pretrained, SHEETS, selections(ANSWERED_RATIOS))
        texts.append(f"SmolLM2-135M, {SHEETS} sheets of 8 questions, chance 25 %:\n" + _right(answers))
        series["answers"] = {name: asdict(result) for name, result in answers.items()}
    if ROUNDS:
        seconds = timed(pretrained, ROUNDS, selections((RATIO_OF_BARS,)))
        texts.append(_times(seconds))
        figures += time_figures(seconds)
        series["seconds"] = asdict(seconds)
    threads = f"{torch.get_num_threads()} threads; ± is one standard error"
    return Report("blend", "\n\n".join([threads, *texts]), figures, series, pictures)


def _everything() -> dict[str, Selection]:
    return {
        "all": AllTokens(),
        **{name: selection for name, selection in selections((1.0,)).items() if name != NAIVE},
    }


def _exact_figures(model: str, comparisons: Compared) -> Iterator[Figure]:
    ways = [way for name, way in comparisons.items() if name != FULL]
    number, prompts = len(ways), len(ways[0].divergence)
    what = f"{model}: all computed, {number} selections, {prompts} prompts"
    yield at_most(f"{what}: largest KL", max(max(way.divergence) for way in ways), "nats", 0)
    equal = statistics.mean(same for way in ways for same in way.is_equal)
    yield at_least(f"{what}: logits equal bit for bit", 100 * equal, "%", 100)


def _quality_figures(comparisons: Compared) -> Iterator[Figure]:
    """Yield the quality figures. Bars apply to the better selection."""
    naive = comparisons[NAIVE].divergence
    yield _with_interval("KL, naive reuse", mean(naive), "nats")
    names = {kind: name_of(kind, RATIO_OF_BARS) for kind in KINDS}
    best = min(names.values(), key=lambda name: np.mean(comparisons[name].divergence))
    for name in names.values():
        yield _with_interval(f"KL, {name}", mean(comparisons[name].divergence), "nats")
        left = share(comparisons[name].divergence, naive)
        yield _with_interval("    of naive reuse", left, "%", LARGEST_SHARE if name == best else None)
    agreement = mean(comparisons[best].agreement)
    yield at_least(f"same next token, {best}", 100 * agreement.value, "%", LEAST_AGREEMENT)


def _with_interval(what: str, estimate: Estimate, unit: str, limit: float | None = None) -> Figure:
    scale = 100 if unit == "%" else 1
    value, half = scale * estimate.value, scale * 1.96 * estimate.error
    bar, holds = ("", None) if limit is None else (f"<= {limit:g} {unit}", value <= limit)
    return Figure(what, value, unit, bar, holds, value - half, value + half)


def _little_figures(comparisons: Compared) -> Iterator[Figure]:
    means = [np.mean(comparisons[name_of("largest deviation", ratio)].divergence) for ratio in RATIOS]
    falls = all(before > after for before, after in pairwise(means))
    yield Figure("little model: KL falls with the ratio (largest deviation)", falls, "", "always", falls)
    at_bar = means[RATIOS.index(RATIO_OF_BARS)]
    yield at_most("little model: KL at 15 %, of it at 0 %", 100 * float(at_bar / means[0]), "%", 20)


def _quality(
    model: str, cases: Sequence[Case], comparisons: Compared, answers: dict[str, Answers] | None = None
) -> str:
    tokens = np.mean([sum(map(len, case.segments)) for case in cases])
    asking = np.mean([len(case.segments[-1]) for case in cases])
    naive = comparisons[NAIVE].divergence
    rows = [
        (
            name,
            mean(comparison.divergence).shown(1, 5),
            share(comparison.divergence, naive).shown(100),
            mean(comparison.agreement).shown(100),
        )
        for name, comparison in comparisons.items()
    ]
    head = f"{model}: {len(cases)} prompts of {tokens:.0f} tokens, {asking:.0f} of them the question"
    shown = table(("way", "KL, nats", "of naive reuse, %", "same next token, %"), rows)
    return "\n".join([head, shown, *([_right(answers)] if answers else [])])


def _answers(comparisons: Compared, facts: Sequence[Fact]) -> dict[str, Answers]:
    """Return the small model's answers, one question per prompt."""
    made = {}
    for name, comparison in comparisons.items():
        right = [float(said == fact.answer) for said, fact in zip(comparison.next_token, facts, strict=True)]
        of_kind = [
            [is_right for is_right, fact in zip(right, facts, strict=True) if fact.is_spread == is_spread]
            for is_spread in (False, True)
        ]
        made[name] = Answers(*of_kind)
    return made


def _right(answers: dict[str, Answers]) -> str:
    rows = [
        (name, mean(answer.within).shown(100), mean(answer.spread).shown(100))
        for name, answer in answers.items()
    ]
    return table(("way", "right within a document, %", "right across two, %"), rows)


def _overhead(seconds: Seconds, name: str) -> list[float]:
    return [sum(parts.values()) for parts in seconds.blending[name]]


def _times(seconds: Seconds) -> str:
    full = seconds.first_token[FULL]
    rows = [
        (name, spread(samples), f"{statistics.median(map(float.__truediv__, samples, full)):.3f}")
        for name, samples in seconds.first_token.items()
    ]
    layers = seconds.num_layers
    per_layer = {
        "reading the documents' KV once": seconds.reading,
        "memcpy of as many bytes": seconds.copying,
        **{f"blending's own, {name}": _overhead(seconds, name) for name in seconds.blending},
    }
    parts = [(name, spread([sample / layers for sample in samples])) for name, samples in per_layer.items()]
    number = len(full)
    return "\n".join(
        [
            f"SmolLM2-135M, {seconds.num_tokens} tokens, {number} rounds; median (min-max):",
            table(("way", "time to first token", "of full prefill"), rows),
            f"per layer ({layers} layers, {seconds.num_bytes / layers / 1e6:.1f} MB of KV each):",
            table(("what", "time"), parts),
        ]
    )


def time_figures(seconds: Seconds) -> Iterator[Figure]:
    """Yield the time figures. Bars apply to selections that recompute tokens."""
    first = {name: paired(seconds.first_token[name], seconds.first_token[FULL]) for name in seconds.blending}
    overhead = {name: paired(_overhead(seconds, name), seconds.reading) for name in seconds.blending}
    for what, shares, limit in (
        ("time to first token, of full prefill", first, LARGEST_TIME),
        ("blending's own, of reading the KV once", overhead, LARGEST_OVERHEAD),
    ):
        for name, ratio in shares.items():
            label = f"{what}: {name}"
            yield of(label, ratio, "%") if name == NAIVE else at_most(label, ratio, "%", limit)


def plot(comparisons: Compared) -> str:
    """Draw the mean divergence by ratio as SVG. Kinds differ in colour (Okabe and Ito) and marker."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    naive = mean(comparisons[NAIVE].divergence)
    styles = zip(KINDS, ("#0072B2", "#D55E00", "#000000"), "os^", strict=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "blend", "font.family": "sans-serif"}):
        picture = Picture(figsize=(6, 3.4), layout="constrained")
        axes = picture.subplots()
        for kind, colour, marker in styles:
            points = {0.0: naive} | {
                ratio: mean(comparisons[name].divergence)
                for ratio in RATIOS
                if (name := name_of(kind, ratio)) in comparisons
            }
            axes.errorbar(
                [100 * ratio for ratio in points],
                [point.value for point in points.values()],
                [point.error for point in points.values()],
                color=colour, marker=marker, markersize=5, capsize=2, label=kind,
            )  # fmt: skip
        limit = LARGEST_SHARE / 100 * naive.value
        axes.axhline(limit, linestyle="--", color="grey", label=f"{LARGEST_SHARE:g} % of naive reuse")
        axes.set(xlabel="tokens computed again, %", ylabel="KL to full prefill, nats", ylim=(0, None))
        axes.legend()
        file = io.StringIO()
        picture.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
