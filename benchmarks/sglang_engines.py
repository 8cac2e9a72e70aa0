"""SGLang engines of the benchmarks, and the time to the first token of a prompt."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.sglang.engine import MEASURED, PAGE_TOKENS, Answer, SGLangEngine, Storage, make_prompt

HIT_TOKENS = 8192
PROMPT_TOKENS = HIT_TOKENS + 16
"""A document and a question. SGLang always computes the last token, so all full pages can be hits."""
PAGES = HIT_TOKENS // PAGE_TOKENS
DEVICE_TOKENS = HIT_TOKENS + 1024
"""Size of an engine's own KV: one prompt."""
WARM_UP_TOKENS = 256
NO_HICACHE: dict[str, Any] = {"enable_hierarchical_cache": False, "hicache_ratio": None}
BUFFER: dict[str, Any] = {"hicache_host_memory_mode": "buffer_only", "hicache_ratio": None}
"""Arguments that make SGLang's host pool a buffer of the size that SGLang chooses."""

Seconds = dict[str, list[float]]


def engine(log: Path, storage: Storage | None = None, **options: Any) -> SGLangEngine:
    """Start an engine without waiting for it."""
    environment = {**MEASURED["environment"], **options.pop("environment", {})}
    defaults = MEASURED | {"max_total_tokens": DEVICE_TOKENS, "environment": environment}
    return SGLangEngine(log, storage, **(defaults | options))


def warm_up(started: SGLangEngine) -> None:
    """Wait until the engine is ready, and run one request, which pays for lazy imports."""
    started.wait_ready()
    started.generate(make_prompt(WARM_UP_TOKENS, "warm-up"), 1)


def prompt(seed: object) -> list[int]:
    """Return a long prompt."""
    return make_prompt(PROMPT_TOKENS, seed)


def first_token(started: SGLangEngine, tokens: list[int], tier: str = "") -> Answer:
    """Return the answer of one token, with the seconds from the request's arrival to this token.

    All of the document must come from ``tier``: ``host`` or ``storage``, or nothing at all without a tier.
    Raises RuntimeError otherwise.
    """
    answer = started.generate(tokens, 1)
    expected = {name: HIT_TOKENS if name == tier else 0 for name in answer.cached}
    if answer.cached != expected:
        raise RuntimeError(f"cached tokens are {answer.cached}, not {expected}; is the machine busy?")
    return answer


def stored_rows(sidecar: SidecarProcess) -> int:
    """Return the number of rows that the sidecar has ever had in memory."""
    return _stored_rows(sidecar.stats())


class Stores(NamedTuple):
    """Pages that an engine stores in a sidecar from now on."""

    engine: SGLangEngine
    sidecar: SidecarProcess
    num_rows: int
    num_tokens: int

    @classmethod
    def begin(cls, engine: SGLangEngine, sidecar: SidecarProcess) -> Stores:
        """Count from the present state, in which no store may be running."""
        return cls(engine, sidecar, stored_rows(sidecar), engine.num_stored_tokens())

    def wait(self, num_pages: int) -> None:
        """Wait until so many pages are stored, and written through to Redis if the sidecar has one.

        Then neither stores nor writes disturb the next measurement.
        """
        self.sidecar.wait_until(lambda stats: _stored_rows(stats) >= self.num_rows + num_pages)
        # A row counts from its reservation on. Asked only now, the engine spends little time on its metrics.
        self.engine.wait_stored(self.num_tokens + num_pages * PAGE_TOKENS)
        self.sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])


def forget_memory(started: SGLangEngine, sidecar: SidecarProcess) -> None:
    """Restart the sidecar with an empty arena, so that only the remote tier has rows."""
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    wait_attached(started)
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])


def wait_attached(started: SGLangEngine) -> None:
    """Wait until the engine hits a small prompt of its own in its storage: it attaches without help.

    SGLang stores pages in the order of requests. So the pages of all earlier requests are stored, too, if the
    engine was attached already.
    """
    seeds = itertools.count()

    def is_hit() -> bool:
        tokens = make_prompt(PAGE_TOKENS + 1, f"{time.time_ns()} {next(seeds)}")
        started.generate(tokens, 1)
        started.flush_cache()
        return started.generate(tokens, 1).cached["storage"] > 0

    wait_until(is_hit, what="the engine hits its storage")


def _stored_rows(stats: dict[str, Any]) -> int:
    memory = stats["memory"]
    return int(memory["used_rows"] + sum(memory["removed"].values()))
