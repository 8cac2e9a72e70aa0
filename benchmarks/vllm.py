"""Time to first token on a real engine at 8,192 prompt tokens, and the speed of prompts that hit nothing.

Beside it the same engine with no connector: cold (``bare``), and a hit in its own prefix cache (``own hit``),
which copies nothing: no cache outside the engine can be faster. Each prompt meets all ways in turn, the two
engines first by chance, so that what else the machine does falls out of the ratios. Times to first token are
measured in the layout "shared" of ``new_prompts``, where sidecar and Redis may use all of the engine's cores.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import new_prompts
from benchmarks.new_prompts import BARE, Measured, Pod, Seconds, random_tokens
from benchmarks.report import Figure, Report, at_most, of, paired, spread
from testing.child_process import wait_until
from testing.engine.process import EngineProcess
from testing.processes import SidecarProcess

PROMPT_TOKENS, CHUNK_TOKENS, REPEATS = 8192, 256, 15
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
    """Seconds. Raises RuntimeError when the cache did not do what is measured: then there is no figure."""
    (answer,) = engine.generate(tokens, max_tokens=1)
    if (answer.num_cached_tokens > 0) is not is_hit:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens came from the cache; is the machine busy?")
    return answer.ttft


def forget_memory(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Only the remote tier is left: another sidecar, an empty arena. The engine attaches again by itself, and
    knows it a moment after the sidecar does: when its own small prompt is hit.
    """
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    small = prompt(time.time_ns(), CHUNK_TOKENS + 1)
    wait_until(lambda: engine.generate(small, max_tokens=1)[0].num_cached_tokens, what="attached again")


def settle(sidecar: SidecarProcess, rows: int) -> None:
    """Until so many rows are written through: what follows is not measured beside it."""
    sidecar.wait_until(lambda stats: stats["remote"]["written"] >= rows, timeout=60)


def first_tokens(pod: Pod, bare: Pod) -> tuple[Seconds, dict[str, Seconds]]:
    """Return seconds to the first token by way, and by kind of hit seconds of each phase."""
    engine, sidecar = pod.engine, pod.sidecar
    assert sidecar is not None
    seconds: Seconds = {name: [] for name in ("bare", "own hit", "cold", "memory hit", "remote hit")}
    phases: dict[str, Seconds] = {hit: {phase: [] for phase in PHASES} for hit in HITS}

    def measure(name: str, engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> None:
        seconds[name].append(ttft(engine, tokens, is_hit=is_hit))
        for phase, samples in phases.get(name, {}).items():
            samples.append(sum(engine.phases()[phase]))

    for warm in (engine, bare.engine):
        ttft(warm, prompt(REPEATS))
    for repeat in range(REPEATS):
        tokens = prompt(repeat)
        written = sidecar.stats()["remote"]["written"]
        colds = [("bare", bare.engine), ("cold", engine)]
        for name, which in random.sample(colds, 2):
            measure(name, which, tokens)
        settle(sidecar, written + ROWS)
        hits = [("own hit", bare.engine), ("memory hit", engine)]
        for name, which in random.sample(hits, 2):
            measure(name, which, tokens, is_hit=True)
        forget_memory(engine, sidecar)
        measure("remote hit", engine, tokens, is_hit=True)
    return seconds, phases


def run() -> Report:
    throughput: list[tuple[new_prompts.Layout, Measured]] = []
    seconds: Seconds = {}
    phases: dict[str, Seconds] = {}
    for layout in new_prompts.layouts():
        with (
            tempfile.TemporaryDirectory() as folder,
            new_prompts.pods(Path(folder), layout) as pods,
        ):
            if not seconds:
                seconds, phases = first_tokens(pods["Redis"], pods[BARE])
            throughput.append((layout, new_prompts.measure(layout, pods)))
    conditions = "\n".join(
        [_conditions(seconds, phases), *(new_prompts.conditions(*each) for each in throughput)]
    )
    figures = [figure for each in throughput for figure in new_prompts.figures(*each)]
    return Report("vllm", conditions, [*_figures(seconds), *figures])


def _conditions(seconds: Seconds, phases: dict[str, Seconds]) -> str:
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in seconds.items())
    profile = "\n".join(
        f"  {what:<62}  "
        + "  ".join(f"{statistics.median(phases[hit][phase]) * 1e3:6.2f} ms" for hit in HITS)
        for phase, what in PHASES.items()
    )
    return (
        "vLLM on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket;\n"
        f"{PROMPT_TOKENS} prompt tokens, 1 answer token, {REPEATS} prompts.\n"
        "Ratios are medians of neighbours' with 95 % intervals. Median (min-max):\n"
        f"{shown}\n"
        f"Where the time of a hit goes, medians ({', '.join(HITS)}):\n"
        f"{profile}\n"
        f"{new_prompts.BATCH} new prompts of {new_prompts.BATCH_TOKENS} tokens at once,"
        f" {new_prompts.ROUNDS} rounds; where cores are shared,"
        f" sidecar and Redis at nice {new_prompts.NICENESS};"
        " shares are those of an engine with no connector:"
    )


def _figures(seconds: Seconds) -> list[Figure]:
    cold, own, hit = seconds["cold"], seconds["own hit"], seconds["memory hit"]
    return [
        at_most("memory hit, share of cold", paired(hit, cold), "%", 8),
        at_most("remote hit, share of cold", paired(seconds["remote hit"], cold), "%", 25),
        at_most("memory hit, of a hit in the engine's own cache", paired(hit, own), "x", 1.25),
        of("speed of one cold prompt, of an engine with no connector", paired(seconds["bare"], cold), "%"),
    ]
