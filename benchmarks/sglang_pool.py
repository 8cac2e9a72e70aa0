"""Measure how large SGLang's host pool must be: hits of eight long prompts that arrive at once.

SGLang moves KV between the engine and a storage backend through pages of its host pool, in one of two modes.
In mode ``cache``, the pool is also a cache. In mode ``buffer_only``, it only holds pages on their way.

All prompts are in the sidecar's memory. For each mode and size, a new engine gets all of them at once. Its
own KV holds half of them. Then it gets two new prompts, whose pages it should store.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_operator.components.engine.kinds.sglang import HOST_POOL_RATIO

from benchmarks import sglang_engines
from benchmarks.report import Figure, at_least, table
from benchmarks.sglang_engines import HIT_TOKENS, PAGES, PROMPT_TOKENS, Stores, prompt
from testing.processes import SidecarProcess
from testing.sglang.engine import SGLangEngine, lmcache_storage

NUM_PROMPTS, NUM_NEW = 8, 2
DEVICE_TOKENS = (NUM_PROMPTS // 2) * (HIT_TOKENS + 1024)
RECOMMENDED = ("buffer_only", float(HOST_POOL_RATIO))
"""The operator's default: the smallest pool that holds any prompt that the engine can hold."""
POOLS = {
    "buffer_only": (RECOMMENDED[1], 0.5, 0.25, 0.2),
    "cache": (2.0, 1.0, 0.5),
}
"""Host pools by mode: their sizes, as shares of the engine's own KV. 0.2 is less than one prompt."""
_STORE_SECONDS = 3.0
"""Longest wait for the pages of new prompts."""
_KV_BYTES = 4096
"""Bytes of a token's KV."""


class Outcome(NamedTuple):
    """Hits and stores with one host pool."""

    mode: str
    ratio: float
    megabytes: float
    hit_share: float
    """Tokens that came from the sidecar, as a share of all full pages of the prompts."""
    stored_share: float
    first_token_seconds: list[float]

    def row(self) -> tuple[str, ...]:
        """Return a row of the table of conditions."""
        times = self.first_token_seconds
        median, last = statistics.median(times), max(times)
        return (
            self.mode,
            f"{self.ratio:g}",
            f"{self.megabytes:.0f} MB",
            f"{self.hit_share:.0%}",
            f"{self.stored_share:.0%}",
            f"{median * 1e3:.0f} ms",
            f"{last * 1e3:.0f} ms",
        )


def measure(folder: Path) -> list[Outcome]:
    """Run the prompts with each host pool."""
    prompts = [prompt(f"queued {number}") for number in range(NUM_PROMPTS)]
    with SidecarProcess(memory_size="1Gi") as sidecar:
        with _engine(folder, sidecar, *RECOMMENDED) as filler:
            sglang_engines.warm_up(filler)
            sglang_engines.wait_attached(filler)
            stores = Stores.begin(filler, sidecar)
            for tokens in prompts:
                filler.generate(tokens, 1)
            stores.wait(NUM_PROMPTS * PAGES)
        return [
            _outcome(folder, sidecar, mode, ratio, prompts)
            for mode, ratios in POOLS.items()
            for ratio in ratios
        ]


def conditions(outcomes: list[Outcome]) -> str:
    """Return the table of all outcomes."""
    header = ("mode", "ratio", "host memory", "hits", "stored", "first token, median", "last")
    return (
        f"{NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens at once, all in the sidecar's memory;"
        f" a new engine whose own KV holds {DEVICE_TOKENS} tokens:\n"
        + table(header, [outcome.row() for outcome in outcomes])
    )


def figures(outcomes: list[Outcome]) -> Iterator[Figure]:
    """Yield the share of hits after a restart with each host pool that holds a prompt."""
    for outcome in outcomes:
        label = (
            f"full pages hit after a restart, {NUM_PROMPTS} prompts queued, {outcome.mode} {outcome.ratio:g}"
        )
        if (outcome.mode, outcome.ratio) == RECOMMENDED:
            yield at_least(label, 100 * outcome.hit_share, "%", 95)
        elif outcome.ratio * DEVICE_TOKENS > HIT_TOKENS:
            yield Figure(label, 100 * outcome.hit_share, "%")


def _engine(folder: Path, sidecar: SidecarProcess, mode: str, ratio: float) -> SGLangEngine:
    return sglang_engines.engine(
        folder / f"{mode}-{ratio:g}",
        lmcache_storage(sidecar.socket_path),
        max_total_tokens=DEVICE_TOKENS,
        hicache_host_memory_mode=mode,
        hicache_ratio=ratio,
    )


def _outcome(
    folder: Path, sidecar: SidecarProcess, mode: str, ratio: float, prompts: list[list[int]]
) -> Outcome:
    with _engine(folder, sidecar, mode, ratio) as engine:
        sglang_engines.warm_up(engine)
        sglang_engines.wait_attached(engine)
        answers = engine.generate_all(*prompts, max_new_tokens=1)
        hit_share = sum(answer.cached["storage"] for answer in answers) / (len(prompts) * HIT_TOKENS)
        num_rows = sglang_engines.stored_rows(sidecar)
        new_prompts = (prompt(f"{mode} {ratio} {number}") for number in range(NUM_NEW))
        engine.generate_all(*new_prompts, max_new_tokens=1)
        with contextlib.suppress(AssertionError):  # SGLang drops pages for which the pool is too small
            sidecar.wait_until(
                lambda stats: sglang_engines.stored_rows(sidecar) >= num_rows + NUM_NEW * PAGES,
                timeout=_STORE_SECONDS,
            )
        num_stored = sglang_engines.stored_rows(sidecar) - num_rows
        tokens = engine.metrics("sglang:hicache_host_total_tokens")["sglang:hicache_host_total_tokens"]
    return Outcome(
        mode,
        ratio,
        tokens * _KV_BYTES / 1e6,
        hit_share,
        num_stored / (NUM_NEW * PAGES),
        [answer.first_token_seconds for answer in answers],
    )
