"""Measure the time to first token of a model in which five of six layers have a sliding window.

Prompts have 8,192 tokens. The benchmark also counts the tokens that a hit moves. Window groups must move no
more than their windows cover.

A second engine has no connector (``bare``). Each prompt runs on both engines in random order, so that noise
of the machine cancels out in the ratios.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, Report, at_most, of, paired, spread
from benchmarks.vllm import CHUNK_TOKENS, PROMPT_TOKENS, prompt, ttft
from testing.engine.process import EngineProcess, connector_config
from testing.engine.tiny_kinds import GEMMA3, WINDOW
from testing.processes import SidecarProcess

REPEATS = 15


def run() -> Report:
    model: dict[str, Any] = {"model": str(GEMMA3.path)}
    with (
        tempfile.TemporaryDirectory() as folder,
        SidecarProcess(memory_size="512Mi") as sidecar,
        EngineProcess(Path(folder) / "engine", connector_config(sidecar.socket_path), **model) as engine,
        EngineProcess(Path(folder) / "bare", **model) as bare,
    ):
        for warm in (engine.wait_ready(), bare.wait_ready()):
            warm.stop_hashing_kv()
            ttft(warm, prompt(REPEATS))
        before = engine.loaded_tokens()
        seconds: dict[str, list[float]] = {"bare": [], "cold": [], "hit": []}
        for repeat in range(REPEATS):
            for name, which in random.sample([("bare", bare), ("cold", engine)], 2):
                seconds[name].append(ttft(which, prompt(repeat)))
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"], timeout=60)
            seconds["hit"].append(ttft(engine, prompt(repeat), is_hit=True))
        moved = [
            (kind, (tokens - first) / REPEATS)
            for (kind, tokens), (_, first) in zip(engine.loaded_tokens(), before, strict=True)
        ]
    return Report("hybrid", _conditions(seconds, moved), _figures(seconds, moved))


def _conditions(seconds: dict[str, list[float]], moved: list[tuple[str, float]]) -> str:
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in seconds.items())
    groups = ", ".join(f"{kind} {tokens:g}" for kind, tokens in moved)
    return (
        f"vLLM on the CPU, a tiny Gemma 3 (fp32, 5 layers with windows of {WINDOW} tokens, 1 without);\n"
        f"{PROMPT_TOKENS} prompt tokens, 1 answer token, {REPEATS} prompts.\n"
        f"Tokens moved per hit and KV group: {groups}.\n"
        "Ratios are medians of neighbours' with 95 % intervals. Median (min-max):\n" + shown
    )


def _figures(seconds: dict[str, list[float]], moved: list[tuple[str, float]]) -> list[Figure]:
    speed = paired(seconds["bare"], seconds["cold"])
    windows = max(tokens for kind, tokens in moved if kind == "SlidingWindowSpec")
    return [
        at_most("hit, share of cold", paired(seconds["hit"], seconds["cold"]), "%", 12),
        at_most("tokens moved of a window group", windows, "tokens", WINDOW + CHUNK_TOKENS),
        of("speed of one cold prompt, of an engine with no connector", speed, "%"),
    ]
