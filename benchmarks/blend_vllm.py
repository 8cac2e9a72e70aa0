"""Measure blending in vLLM: time to first token, quality, gaps of other requests, and cost for those.

Times are processor seconds of the engine, so that other load on the machine hardly changes them. All ways
take turns. SmolLM2-135M has real weights in float32, so that its KV has the size and the structure of real
KV. Gaps and costs are those of a tiny Llama. The environment variables ROUNDS (of times), PROMPTS (of 200
tokens per document), LONG_PROMPTS (of 1,000), GAPS and BATCHES set the amount of work. 0 skips a part.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.blend_engine import BlendEngine, Gap, Prefill
from benchmarks.new_prompts import random_tokens
from benchmarks.report import Figure, Report, at_least, at_most, of, paired, table
from testing.blend.texts import prompt
from testing.blend.weights import smollm2
from testing.engine.process import patient_config
from testing.processes import SidecarProcess

ROUNDS, PROMPTS, LONG_PROMPTS, GAPS, BATCHES = (
    int(os.environ.get(name, default))
    for name, default in (("ROUNDS", 1), ("PROMPTS", 40), ("LONG_PROMPTS", 5), ("GAPS", 7), ("BATCHES", 9))
)
RATIO = 0.15
SELECTIONS = "attended", "deviation", "first"
NAIVE = "none"
TAKEN = "{}, documents taken out of another prompt"
LARGEST_SHARE = {"attended": 15.0, "deviation": 25.0, TAKEN.format("attended"): 20.0}
"""Largest KL in per cent of naive reuse, for documents of 200 tokens."""
LARGEST_TIME, LARGEST_GAP, LEAST_SPEED = 30.0, 1.2, 99.0
DOCUMENT = {"lmcache": {"document": True}}
MAX_NUM_SEQS = 128
"""Default of ``vllm serve`` on CPUs."""
LONG_DOCUMENT_TOKENS = 2640
"""Three of them and a question are 8,000 tokens."""
_numbers = itertools.count()


class Prompt(NamedTuple):
    """Documents and a question, as tokens."""

    documents: list[list[int]]
    question: list[int]

    @property
    def tokens(self) -> list[int]:
        return [*itertools.chain(*self.documents), *self.question]

    def exact(self) -> dict[str, Any]:
        """Return a request that finds nothing."""
        return {"prompt": self.tokens, "cache_salt": f"cold {next(_numbers)}"}

    def blended(self, selection: str, salt: str, ratio: float = RATIO) -> dict[str, Any]:
        blend = {"documents": list(map(len, self.documents)), "selection": selection, "ratio": ratio}
        parameters = {"lmcache": {"blend": blend}}
        return {"prompt": self.tokens, "cache_salt": salt, "kv_transfer_params": parameters}


def real_prompts(model: Path, number: int, num_tokens: int) -> Iterator[Prompt]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    rng = np.random.default_rng(1)
    for _ in range(number):
        made = prompt(rng, lambda text: len(encode(text)), num_tokens)
        yield Prompt([encode(text) for text in made.documents], encode(made.question))


@contextmanager
def engine_of(
    folder: Path, model: Path | None, blend: str = "request", max_model_len: int = 8192, **settings: Any
) -> Iterator[BlendEngine]:
    """Start an engine with a sidecar. ``model`` replaces the tiny model. ``settings`` are the connector's."""
    options: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": 256 << 20}
    if model is not None:
        options |= {"model": str(model), "max_model_len": max_model_len, "kv_cache_memory_bytes": 1 << 30}
    with SidecarProcess(memory_size="2Gi" if model else "512Mi") as sidecar:
        config = patient_config(sidecar.socket_path, blend=blend, **settings)
        log = folder / f"log {next(_numbers)}"
        with BlendEngine(log, config, enable_prefix_caching=True, **options) as engine:
            engine.wait_ready(900)
            sidecar.wait_attached(engine.run_short_request)
            yield engine


def announce(engine: BlendEngine, made: Prompt) -> str:
    """Store the documents, each computed alone. Returns the salt under which they are found."""
    salt = f"documents {next(_numbers)}"
    for document in made.documents:
        engine.prefill({"prompt": document, "cache_salt": salt, "kv_transfer_params": DOCUMENT})
    engine.scrub_kv()
    return salt


def compute(engine: BlendEngine, made: Prompt) -> str:
    """Compute the documents in one prompt, in another order and behind other text. They are taken out of it.

    Returns the salt under which they are found.
    """
    salt, documents = f"documents {next(_numbers)}", made.documents[::-1]
    parameters = {"documents": list(map(len, documents)), "start": len(made.question)}
    tokens = [*made.question, *itertools.chain(*documents), *made.question]
    engine.prefill(
        {"prompt": tokens, "cache_salt": salt, "kv_transfer_params": {"lmcache": {"blend": parameters}}}
    )
    engine.scrub_kv()
    return salt


def blend(
    engine: BlendEngine,
    made: Prompt,
    selection: str,
    salt: str,
    compared: int = 0,
    ratio: float = RATIO,
    name: str = "",
) -> Prefill:
    """Run a blended request, and remember the log-probabilities after its last ``compared`` tokens, if any.

    Their name is ``name``, or that of the selection. Raises RuntimeError if the prompt was not blended.
    """
    request, name = made.blended(selection, salt, ratio), name or selection
    prefill = engine.prefill(request, compared, name if compared else "")
    if prefill.blended is None:
        raise RuntimeError(f"the prompt was not blended, but computed exactly: {engine.log[-2000:]}")
    return prefill


def times(engine: BlendEngine, made: Prompt) -> dict[str, list[Prefill]]:
    """Return the prefills of each way. The documents are in another order than that of prefix caching."""
    salt = announce(engine, made)
    moved = Prompt([made.documents[-1], *made.documents[:-1]], made.question)
    samples: dict[str, list[Prefill]] = {}
    for _ in range(ROUNDS):
        engine.scrub_kv()
        samples.setdefault("full prefill", []).append(engine.prefill(moved.exact()))
        other = {"cache_salt": f"prefix {next(_numbers)}"}  # else its KV would be an exact hit below
        engine.prefill({"prompt": moved.documents[0], **other})
        prefix = engine.prefill({"prompt": moved.tokens, **other})
        samples.setdefault("prefix caching, first document known", []).append(prefix)
        for selection in (*SELECTIONS, NAIVE):
            engine.scrub_kv()
            samples.setdefault(selection, []).append(blend(engine, moved, selection, salt))
        again = blend(engine, moved, NAIVE, salt)
        samples.setdefault("the last one asked again", []).append(again)
    return samples


def time_figures(samples: dict[str, list[Prefill]]) -> tuple[str, list[Figure]]:
    full = statistics.median(each.cpu_seconds for each in samples["full prefill"])
    rows, figures = [], []
    for name, prefills in samples.items():
        cpu, wall = (
            statistics.median(seconds)
            for seconds in (
                [each.cpu_seconds for each in prefills],
                [each.seconds for each in prefills],
            )
        )
        last = prefills[-1]
        rows.append((name, f"{cpu:.2f}", f"{wall:.2f}", str(last.num_cached_tokens), str(last.blended or "")))
        what = f"CPU time to first token, of full prefill: {name}"
        if name in SELECTIONS:
            figures.append(at_most(what, 100 * cpu / full, "%", LARGEST_TIME))
        elif name != "full prefill":
            figures.append(of(what, 100 * cpu / full, "%"))
    return table(("way", "CPU s", "wall s", "cached", "blended"), rows), figures


class Quality(NamedTuple):
    """Values by prompt of one way."""

    divergence: list[float]
    agreement: list[float]
    cpu_share: list[float]
    """Processor time to the first token, as a share of a full prefill."""


def quality(engine: BlendEngine, prompts: Iterator[Prompt]) -> dict[str, Quality]:
    taken = {TAKEN.format(name): name for name in (NAIVE, *SELECTIONS)}
    samples = {name: Quality([], [], []) for name in (NAIVE, *SELECTIONS, *taken)}
    for made in prompts:
        salts = announce(engine, made), compute(engine, made)
        full = engine.prefill(made.exact(), len(made.question), "full")
        for name, values in samples.items():
            selection, salt = taken.get(name, name), salts[name in taken]
            prefill = blend(engine, made, selection, salt, len(made.question), name=name)
            divergence, agreement = engine.compare("full", name)
            measured = divergence, agreement, prefill.cpu_seconds / full.cpu_seconds
            for column, sample in zip(values, measured, strict=True):
                column.append(sample)
    return samples


def quality_figures(
    samples: dict[str, Quality], num_tokens: int, limits: dict[str, float]
) -> tuple[str, list[Figure]]:
    naive = statistics.mean(samples[NAIVE].divergence)
    rows, figures = [], []
    for name, values in samples.items():
        mean = statistics.mean(values.divergence)
        error = statistics.stdev(values.divergence) / len(values.divergence) ** 0.5
        share = 100 * mean / naive
        same, cpu = (100 * statistics.mean(each) for each in values[1:])
        rows.append((name, f"{mean:.4f} ± {error:.4f}", f"{share:.1f}", f"{same:.1f}", f"{cpu:.1f}"))
        what = f"KL of documents of {num_tokens} tokens, of naive reuse: {name}"
        if name in limits:
            figures.append(at_most(what, share, "%", limits[name]))
        elif name != NAIVE:
            figures.append(of(what, share, "%"))
    head = "way", "KL, nats", "of naive, %", "same next token, %", "CPU time, % of full"
    number = len(samples[NAIVE].divergence)
    return f"{number} prompts with documents of {num_tokens} tokens:\n" + table(head, rows), figures


def gaps(engine: BlendEngine) -> dict[str, list[Gap]]:
    made = Prompt([random_tokens(seed, LONG_DOCUMENT_TOKENS) for seed in range(3)], random_tokens(3, 40))
    salt = announce(engine, made)
    samples: dict[str, list[Gap]] = {}
    for _ in range(GAPS):
        arriving = {"cold": made.exact()}
        arriving |= {name: made.blended(name, salt) for name in SELECTIONS}
        for name, request in random.sample(list(arriving.items()), len(arriving)):
            engine.scrub_kv()
            decoding = {"prompt": random_tokens(next(_numbers), 100)}
            samples.setdefault(name, []).append(engine.gap(decoding, request))
    return samples


def gap_figures(samples: dict[str, list[Gap]]) -> tuple[str, list[Figure]]:
    rows = [
        (name, *(f"{1e3 * statistics.median(values):.0f}" for values in zip(*gaps_of_way, strict=True)))
        for name, gaps_of_way in samples.items()
    ]
    cold = [gap.longest for gap in samples["cold"]]
    figures = [
        at_most(
            f"longest gap of a decoding request beside 8,000 tokens, of a cold prompt's: {name}",
            paired([gap.longest for gap in samples[name]], cold),
            "x",
            LARGEST_GAP,
        )
        for name in SELECTIONS
    ]
    head = "arriving prompt", "longest gap, CPU ms", "usual gap", "its time to first token"
    return table(head, rows), figures


def batch(engine: BlendEngine) -> float:
    """Return the processor seconds of new prompts that do not ask, with short answers."""
    prompts = [random_tokens(next(_numbers), 1024) for _ in range(6)]
    before = engine.cpu_seconds()
    engine.generate(*prompts, max_tokens=16)
    return engine.cpu_seconds() - before


def costs(folder: Path) -> list[Figure]:
    """Compare engines that blend and do not, with requests that do not ask."""
    seconds: dict[str, list[float]] = {"off": [], "request": []}
    with engine_of(folder, None, "off") as off, engine_of(folder, None, "request") as request:
        engines = {"off": off, "request": request}
        for number in range(BATCHES + 1):
            for name in random.sample(list(engines), 2):
                sample = batch(engines[name])
                if number:  # the first batch starts threads
                    seconds[name].append(sample)
    speed = paired(seconds["off"], seconds["request"])
    return [
        at_least("speed of requests that do not ask, of an engine with blend=off", speed, "%", LEAST_SPEED)
    ]


def run() -> Report:
    texts: list[str] = [f"{RATIO:.0%} of the reused tokens are recomputed; documents are computed alone"]
    figures: list[Figure] = []

    def add(part: tuple[str, Sequence[Figure]]) -> None:
        texts.append(part[0])
        figures.extend(part[1])
        print(part[0], flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if ROUNDS or PROMPTS or LONG_PROMPTS:
            model = smollm2()
            with engine_of(folder, model) as engine:
                if ROUNDS:
                    (made,) = real_prompts(model, 1, LONG_DOCUMENT_TOKENS)
                    texts.append(f"SmolLM2-135M, {len(made.tokens)} tokens, {ROUNDS} rounds, medians:")
                    add(time_figures(times(engine, made)))
                for number, num_tokens in ((PROMPTS, 200), (LONG_PROMPTS, 1000)):
                    if number:
                        samples = quality(engine, real_prompts(model, number, num_tokens))
                        add(quality_figures(samples, num_tokens, LARGEST_SHARE if num_tokens == 200 else {}))
        if GAPS:
            with engine_of(folder, None) as engine:
                add(gap_figures(gaps(engine)))
        if BATCHES:
            figures += costs(folder)
    return Report("blend_vllm", "\n\n".join(texts), figures)
