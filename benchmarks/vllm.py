"""Measure time to first token on a real engine at 8,192 prompt tokens, and the speed of prompts without hits.

A second engine has no connector. It gives two references: a cold prompt (``bare``), and a hit in its own
prefix cache (``own hit``). Such a hit copies nothing, so no cache outside of the engine can be faster. Each
prompt runs in all ways, on the two engines in random order, so that noise of the machine cancels out in the
ratios. Times to first token use the layout "shared" of ``new_prompts``, in which sidecar and Redis may use
all cores of the engine.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import new_prompts
from benchmarks.new_prompts import NO_CONNECTOR, Measured, Pod, Seconds, random_tokens
from benchmarks.report import Figure, Report, at_most, of, paired, spread
from testing.child_process import wait_until
from testing.engine.process import EngineProcess
from testing.processes import SidecarProcess

PROMPT_TOKENS, CHUNK_TOKENS = 8192, 256
STARTS, PROMPTS = 4, 4
"""Number of starts of all engines, and prompts per start."""
WARM_SEED = STARTS * PROMPTS
ROWS = PROMPT_TOKENS // CHUNK_TOKENS

HITS = "own hit", "memory hit"
PHASES = {
    "arrival": "the request arrives, its blocks are hashed",
    "idle": "steps that compute nothing: the engine waits for the load",
    "load": "    of these, the load itself, on its own threads",
    "computing": "the step that computes the last block",
}


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return random_tokens(seed, num_tokens)


def ttft(engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> float:
    """Return the seconds to the first token. Raises RuntimeError if ``is_hit`` is wrong about the prompt."""
    (answer,) = engine.generate(tokens, max_tokens=1)
    if (answer.num_cached_tokens > 0) is not is_hit:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens came from the cache; is the machine busy?")
    return answer.ttft


def forget_memory(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Restart the sidecar with an empty arena, so that only the remote tier has rows.

    The engine attaches again without help. It notices this a little later than the sidecar, so the function
    waits until the engine hits a small prompt of its own.
    """
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    small = prompt(time.time_ns(), CHUNK_TOKENS + 1)
    wait_until(lambda: engine.generate(small, max_tokens=1)[0].num_cached_tokens, what="attached again")


def settle(sidecar: SidecarProcess, rows: int) -> None:
    """Wait until ``rows`` rows are written through, so that no writes disturb the next measurement."""
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= rows, timeout=60)


class FirstTokens(NamedTuple):
    """Samples of all starts."""

    seconds: Seconds
    """Seconds to the first token, by way."""
    phases: dict[str, Seconds]
    """Seconds of each phase, by kind of hit."""

    @classmethod
    def empty(cls) -> FirstTokens:
        return cls(
            {name: [] for name in ("bare", "own hit", "cold", "memory hit", "remote hit")},
            {hit: {phase: [] for phase in PHASES} for hit in HITS},
        )


def first_tokens(pod: Pod, reference: Pod, seeds: Iterable[int], samples: FirstTokens) -> None:
    """Run a prompt of each seed in all ways, and add the times to ``samples``."""
    engine, sidecar = pod.engine, pod.sidecar
    assert sidecar is not None

    def measure(name: str, engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> None:
        samples.seconds[name].append(ttft(engine, tokens, is_hit=is_hit))
        for phase, seconds in samples.phases.get(name, {}).items():
            seconds.append(sum(engine.phases()[phase]))

    for warm in (engine, reference.engine):
        ttft(warm, prompt(WARM_SEED))
    for seed in seeds:
        tokens = prompt(seed)
        written = sidecar.stats()["remote"]["written"]
        colds = [("bare", reference.engine), ("cold", engine)]
        for name, which in random.sample(colds, 2):
            measure(name, which, tokens)
        settle(sidecar, written + ROWS)
        hits = [("own hit", reference.engine), ("memory hit", engine)]
        for name, which in random.sample(hits, 2):
            measure(name, which, tokens, is_hit=True)
        forget_memory(engine, sidecar)
        measure("remote hit", engine, tokens, is_hit=True)


def run() -> Report:
    throughput = [(layout, Measured.empty()) for layout in new_prompts.layouts()]
    firsts = FirstTokens.empty()
    for start in range(STARTS):
        for layout, measured in throughput:
            with (
                tempfile.TemporaryDirectory() as folder,
                new_prompts.pods(Path(folder), layout) as pods,
            ):
                if layout.name == "shared":
                    seeds = range(start * PROMPTS, (start + 1) * PROMPTS)
                    first_tokens(pods["Redis"], pods[NO_CONNECTOR], seeds, firsts)
                new_prompts.measure(layout, pods, measured)
    conditions = "\n".join([_conditions(*firsts), *(new_prompts.conditions(*each) for each in throughput)])
    figures = [figure for each in throughput for figure in new_prompts.figures(*each)]
    return Report("vllm", conditions, [*_figures(firsts.seconds), *figures])


def _conditions(seconds: Seconds, phases: dict[str, Seconds]) -> str:
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in seconds.items())
    profile = "\n".join(
        f"  {what:<62}  "
        + "  ".join(f"{statistics.median(phases[hit][phase]) * 1e3:6.2f} ms" for hit in HITS)
        for phase, what in PHASES.items()
    )
    return (
        "vLLM on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket;\n"
        f"{PROMPT_TOKENS} prompt tokens, 1 answer token;"
        f" {STARTS} starts of all engines, each with {PROMPTS} prompts and {new_prompts.ROUNDS} rounds.\n"
        "Ratios are medians of neighbours' with 95 % intervals. Median (min-max):\n"
        f"{shown}\n"
        f"Where the time of a hit goes, medians ({', '.join(HITS)}):\n"
        f"{profile}\n"
        f"{new_prompts.BATCH} new prompts of {new_prompts.BATCH_TOKENS} tokens at once;"
        f" where cores are shared, sidecar and Redis at nice {new_prompts.NICENESS};"
        " shares are those of an engine with no connector:"
    )


def _figures(seconds: Seconds) -> list[Figure]:
    cold, engine_hit, hit = seconds["cold"], seconds["own hit"], seconds["memory hit"]
    return [
        at_most("memory hit, share of cold", paired(hit, cold), "%", 8),
        at_most("remote hit, share of cold", paired(seconds["remote hit"], cold), "%", 25),
        at_most("memory hit, of a hit in the engine's own cache", paired(hit, engine_hit), "x", 1.25),
        of("speed of one cold prompt, of an engine with no connector", paired(seconds["bare"], cold), "%"),
    ]
