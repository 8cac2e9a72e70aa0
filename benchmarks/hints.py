"""Compare truthful and wrong hints with an LRU, on requests of agents at a small memory tier."""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from benchmarks.report import Figure, Report, at_least
from lmcache_sidecar.hints import HintBoard, HintedPrompt
from lmcache_store.hints import HintAction, HintKind
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Chains, Geometry
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.tiered.store import TieredStore
from testing.workloads.agents import NO_SESSION, Hint, agent_steps, retained
from testing.workloads.requests import TOKENS, Request

SECONDS = 1500.0
SEEDS = range(3)
PART = 0.1
"""Rows of the tier, as a part of the rows that all requests have together."""

RETAIN_PERCENT = 25
"""The default of ``tiers.memory.retainPercent``."""

_SLOT_BYTES = 4096
_GROUP = KVGroup(0, 16, _SLOT_BYTES)
_ENGINE, _WORKER, _NAMESPACE = b"e" * 16, b"w" * 16, b"n" * 32
_MAX_TTL_SECONDS = 3600.0

Steps = Iterable[Request | Hint]


@lru_cache(maxsize=1 << 20)
def _row_key(key: int) -> bytes:
    return _NAMESPACE + hashlib.sha256(key.to_bytes(8, "big")).digest()


class Replay:
    """Makes a sidecar's calls for an engine that computes nothing, with a simulated clock."""

    def __init__(self, num_rows: int, retain_percent: int) -> None:
        """``num_rows``: size of the memory tier."""
        self.num_rows = self.num_hits = 0
        """Rows of all prompts, and leading rows that were in memory."""
        self._now, self._number = 0.0, 0
        self.board = HintBoard(_MAX_TTL_SECONDS)
        arena = PrivateArena(Geometry(_SLOT_BYTES, 1), num_rows)
        budgets = Budgets(no_salt=Budget(retain_percent=retain_percent))
        self.store = TieredStore(arena, budgets=budgets, clock=lambda: self._now)

    async def run(self, steps: Steps) -> None:
        """Serve all requests, and apply all hints."""
        await self.store.adopt()
        self.store.memory.release_adopted()
        for step in steps:
            self._now = step.time
            self._number += 1
            request_id, keys = f"request {self._number}", [_row_key(key) for key in step.keys]
            if isinstance(step, Hint):
                prompt = HintedPrompt(request_id, "", _ENGINE, _chains(keys), _NAMESPACE)
                await self.board.apply([step.action], prompt, self.store)
            else:
                self._serve(request_id, keys)
        await self.store.close(10.0)

    def _serve(self, request_id: str, keys: Sequence[bytes]) -> None:
        lease_id = _ENGINE, request_id
        num_hits = self.store.lookup(lease_id, _chains(keys)).num_leased
        self.store.lookup(lease_id, _chains(keys), is_hint=True, num_scheduled_hits=num_hits)
        reserved = self.store.reserve(
            keys[num_hits:], 0, _WORKER, length=_SLOT_BYTES, first_chunk=num_hits, request=request_id
        )
        slots = [reservation.slot for reservation in reserved if reservation.slot is not None]
        self.store.memory.commit(slots, 0, _WORKER)  # without checksums, for speed
        self.store.memory.release(lease_id)
        self.num_rows += len(keys)
        self.num_hits += num_hits


def _chains(keys: Sequence[bytes]) -> Chains:
    return Chains(TOKENS, (_GROUP,), (keys,))


def hit_percent(steps: Steps, num_rows: int, retain_percent: int = RETAIN_PERCENT) -> float:
    """Return the part of the prompts' tokens that hit in a memory tier of ``num_rows`` rows."""

    async def replay() -> float:
        run = Replay(num_rows, retain_percent)
        await run.run(steps)
        return 100 * run.num_hits / run.num_rows

    return asyncio.run(replay())


# ---- what users send ----


def none(steps: Steps) -> Iterator[Request]:
    """Return the requests alone."""
    return (step for step in steps if isinstance(step, Request))


def truthful(steps: Steps) -> Steps:
    """Return the hints of a framework that knows its tools."""
    return steps


def only(kind: HintKind) -> Callable[[Steps], Steps]:
    """Return a function: the truthful hints of one kind."""
    return lambda steps: (step for step in steps if isinstance(step, Request) or step.action.kind is kind)


def all_retained(steps: Steps) -> Steps:
    """Retain each prompt for the longest time."""
    return _after_requests(steps, lambda request: True, _MAX_TTL_SECONDS)


def random_retained(seed: int) -> Callable[[Steps], Steps]:
    """Return a function: retain random prompts."""
    rng = random.Random(seed)
    return lambda steps: _after_requests(steps, lambda request: rng.random() < 0.3, 600.0)


def inverted(steps: Steps) -> Steps:
    """Release prompts while tools run. Retain prompts that never repeat, and those of sessions that ended."""
    for step in steps:
        if isinstance(step, Hint):
            is_end = step.action.kind is HintKind.RELEASE
            action = retained(_MAX_TTL_SECONDS) if is_end else HintAction("0", HintKind.RELEASE)
            yield step._replace(action=action)
        else:
            yield from _after_requests(
                [step], lambda request: request.session == NO_SESSION, _MAX_TTL_SECONDS
            )


def _after_requests(steps: Steps, does_retain: Callable[[Request], bool], seconds: float) -> Steps:
    for step in none(steps):
        yield step
        if does_retain(step):
            yield Hint(step.time, step.session, step.keys, retained(seconds))


GOOD: dict[str, Callable[[Steps], Steps]] = {
    "truthful": truthful,
    "truthful, only what to retain": only(HintKind.RETAIN),
    "truthful, only what to release": only(HintKind.RELEASE),
}
WRONG: dict[str, Callable[[Steps], Steps]] = {
    "wrong, all prompts retained": all_retained,
    **{f"wrong, random prompts retained, choice {seed}": random_retained(seed) for seed in range(3)},
    "wrong, dead prompts retained, living ones released": inverted,
}


def run() -> Report:
    traces = [agent_steps(SECONDS, seed=seed) for seed in SEEDS]
    sizes = [int(PART * len({key for step in trace for key in step.keys})) for trace in traces]

    def hits(variant: Callable[[Steps], Steps], retain_percent: int = RETAIN_PERCENT) -> list[float]:
        pairs = zip(traces, sizes, strict=True)
        return [hit_percent(variant(trace), rows, retain_percent) for trace, rows in pairs]

    lru = hits(none)
    figures = [Figure("hits without hints (LRU)", statistics.mean(lru), "% of tokens")]
    figures += _gains("truthful", lru, hits(truthful), bar=10.0)
    figures += _gains("truthful, retainPercent 50", lru, hits(truthful, 50), bar=10.0)
    for name, variant in GOOD.items():
        if variant is not truthful:
            figures += _gains(name, lru, hits(variant))
    for name, variant in WRONG.items():
        figures += _gains(name, lru, hits(variant), bar=0.0)
    conditions = (
        f"{len(traces)} traces of {SECONDS / 60:.0f} minutes; memory tiers of {min(sizes)}-{max(sizes)} rows"
        f" of {TOKENS} tokens, a tenth of a trace's different rows; retainPercent {RETAIN_PERCENT};"
        " simulated clock"
    )
    return Report("hints", conditions, figures)


def _gains(
    name: str, lru: Sequence[float], hits: Sequence[float], bar: float | None = None
) -> Iterator[Figure]:
    gains = [hit - base for hit, base in zip(hits, lru, strict=True)]
    what = f"{name}: hits above the LRU's, mean of the traces"
    mean = statistics.mean(gains)
    yield Figure(what, mean, "points") if bar is None else at_least(what, mean, "points", bar)
    yield Figure(f"{name}: the worst trace", min(gains), "points")
