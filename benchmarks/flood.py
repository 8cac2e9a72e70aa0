"""Hits that a flood of another tenant costs a tenant with a guaranteed share of memory.

The quiet tenant replays sessions of the Mooncake trace on a real sidecar. The flood stores rows that no
request repeats, without a pause. It has one salt, a new salt for each request, or no salt. Each request of
the quiet tenant waits until the flood has stored some requests more, so that its rows grow old.

A quiet tenant that is alone has an upper bound of the same size as its guaranteed share next to the flood.
So both have the same memory. Without a guarantee, the flood must cost hits. Otherwise the figures show
nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Figure, Report, at_most, of
from benchmarks.sizing import TRACES
from lmcache import keys
from testing.processes import RedisProcess, SidecarProcess
from testing.workloads.replay import Engine
from testing.workloads.requests import Request, mooncake

NAMESPACE, QUIET = bytes(32), "quiet"
FLOODS: dict[str, Callable[[int], str]] = {
    "one salt": lambda _: "flooding",
    "a new salt for each request": "flooding {}".format,
    "no salt": lambda _: "",
}
"""The salt of each request of a flood, by the flood's name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    row_bytes: int = 64 << 10
    memory_rows: int = 1024
    """Rows that fit into the memory tier."""
    share_percent: int = 60
    """The quiet tenant's share of memory."""
    flood_rows: int = 12
    """Rows of one request of the flood."""
    flood_requests: int = 8
    """Requests of the flood before each request of the quiet tenant, at least."""
    trace_share: float = 0.02
    """Part of the trace's sessions."""
    rounds: int = 3
    lower_rows: int = 6144
    """Rows that fit into the disk tier and into Redis, with all tiers."""


@dataclass(frozen=True)
class Counts:
    """Rows of the quiet tenant's requests."""

    requested: int = 0
    in_memory: int = 0
    promoted: int = 0
    flooded: int = 0
    """Rows that the flood stored meanwhile, at least."""

    @property
    def memory_percent(self) -> float:
        return 100 * self.in_memory / self.requested

    @property
    def all_percent(self) -> float:
        return 100 * (self.in_memory + self.promoted) / self.requested


def replayed(
    sidecar: SidecarProcess, requests: Sequence[Request], sizes: Sizes, salt_of: Callable[[int], str] | None
) -> Counts:
    """Serve the quiet tenant's requests. ``salt_of``: the salt of each request of a flood; None: no flood."""
    with contextlib.ExitStack() as stack:
        engine = _engine(stack, sidecar, sizes, QUIET)
        flood = stack.enter_context(_flooded(sidecar, sizes, salt_of)) if salt_of else None
        counts = Counts()
        for number, request in enumerate(requests):
            if flood:
                for _ in range(sizes.flood_requests):
                    flood.acquire()
            in_memory, promoted = engine.serve(f"quiet-{number}", request.keys)
            counts = replace(
                counts,
                requested=counts.requested + len(request.keys),
                in_memory=counts.in_memory + in_memory,
                promoted=counts.promoted + promoted,
                flooded=counts.flooded + (sizes.flood_requests * sizes.flood_rows if flood else 0),
            )
        return counts


def _engine(stack: contextlib.ExitStack, sidecar: SidecarProcess, sizes: Sizes, salt: str) -> Engine:
    engine = Engine(sidecar, NAMESPACE, sizes.row_bytes, tenant=keys.tenant(salt, NAMESPACE))
    return stack.enter_context(contextlib.closing(engine))


@contextlib.contextmanager
def _flooded(
    sidecar: SidecarProcess, sizes: Sizes, salt_of: Callable[[int], str]
) -> Iterator[threading.Semaphore]:
    """Flood a sidecar. Yields a semaphore that counts the requests of the flood."""
    fresh, numbers = itertools.count(1 << 40), itertools.count()
    stored, is_over, failures = threading.Semaphore(0), threading.Event(), list[BaseException]()

    def flood(engine: Engine) -> None:
        try:
            while not is_over.is_set():
                number = next(numbers)
                engine.tenant = keys.tenant(salt_of(number), NAMESPACE)
                engine.serve(f"flood-{number}", tuple(itertools.islice(fresh, sizes.flood_rows)))
                stored.release()
        except BaseException as error:
            failures.append(error)
            stored.release(1 << 30)  # the requests of the quiet tenant must not wait

    with contextlib.ExitStack() as stack:
        engine = _engine(stack, sidecar, sizes, salt_of(0))
        thread = threading.Thread(target=flood, args=(engine,), name="flood")
        thread.start()
        try:
            yield stored
        finally:
            is_over.set()
            thread.join()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def started(folder: Path, sizes: Sizes, *, has_lower_tiers: bool, **budget: int) -> Iterator[SidecarProcess]:
    """Start a sidecar in which the quiet tenant has this budget."""
    limits = ", ".join(f"{name}: {value}" for name, value in budget.items())
    file = folder / "tenants"
    file.write_text(f"named: [{{name: {QUIET}, saltHash: {keys.salt_hash(QUIET).hex()}, {limits}}}]\n")
    options: dict[str, object] = {"memory_size": sizes.memory_rows * sizes.row_bytes, "tenants_file": file}
    with contextlib.ExitStack() as stack:
        if has_lower_tiers:
            lower_bytes = sizes.lower_rows * sizes.row_bytes
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-"))
            redis = RedisProcess(maxmemory=lower_bytes, maxmemory_policy="allkeys-lru")
            server = stack.enter_context(redis)
            options |= {"disk_path": place, "disk_size": 2 * lower_bytes, "remote_url": server.unix_url}
        yield stack.enter_context(SidecarProcess(**options))


def measure(sizes: Sizes, *, has_lower_tiers: bool) -> dict[str, list[Counts]]:
    """Replay the requests in rounds, alone and next to each flood. The control has no guarantee."""
    requests = mooncake(TRACES / "mooncake_conversation_trace.jsonl.gz", share=sizes.trace_share).requests
    guarantee = {"minMemoryPercent": sizes.share_percent}
    ways: dict[str, tuple[dict[str, int], Callable[[int], str] | None]] = {
        "alone": ({"memoryPercent": sizes.share_percent}, None),
        "no guarantee": ({"memoryPercent": 100}, FLOODS["one salt"]),
        **{name: (guarantee, salt_of) for name, salt_of in FLOODS.items()},
    }
    if has_lower_tiers:  # takes several times as long
        ways = dict(itertools.islice(ways.items(), 3))
    counts: dict[str, list[Counts]] = {way: [] for way in ways}
    for _ in range(1 if has_lower_tiers else sizes.rounds):
        for way, (budget, salt_of) in ways.items():
            with (
                tempfile.TemporaryDirectory() as name,
                started(Path(name), sizes, has_lower_tiers=has_lower_tiers, **budget) as sidecar,
            ):
                counts[way].append(replayed(sidecar, requests, sizes, salt_of))
    return counts


def figures(counts: dict[str, list[Counts]], sizes: Sizes, *, has_lower_tiers: bool) -> Iterator[Figure]:
    """Compare the hits of the quiet tenant next to each flood with its hits alone."""
    where = "all tiers" if has_lower_tiers else "memory only"
    alone = counts["alone"]
    yield of(f"{where}: hits in memory, alone", statistics.median(c.memory_percent for c in alone), "%")
    if has_lower_tiers:
        yield of("    hits in all tiers, alone", statistics.median(c.all_percent for c in alone), "%")
    for name in (name for name in FLOODS if name in counts):
        lost = [a.memory_percent - b.memory_percent for a, b in zip(alone, counts[name], strict=True)]
        yield at_most(f"    points of hits in memory lost to a flood with {name}", max(lost), "points", 1)
        if has_lower_tiers:
            lost = [a.all_percent - b.all_percent for a, b in zip(alone, counts[name], strict=True)]
            yield of("        points of hits in all tiers", max(lost), "points")
        times = statistics.median(c.flooded for c in counts[name]) / sizes.memory_rows
        yield of("        rows of the flood, in sizes of the memory", times, "")
    control = zip(alone, counts["no guarantee"], strict=True)
    lost = [a.memory_percent - b.memory_percent for a, b in control]
    yield of("    control: points lost in memory without a guarantee", min(lost), "points")


def run() -> Report:
    sizes, measured = Sizes(), list[Figure]()
    for has_lower_tiers in (False, True):
        counts = measure(sizes, has_lower_tiers=has_lower_tiers)
        measured += figures(counts, sizes, has_lower_tiers=has_lower_tiers)
    return Report("flood", _conditions(sizes), measured)


def _conditions(sizes: Sizes) -> str:
    return (
        f"{sizes.trace_share:.0%} of the sessions of the Mooncake trace, {sizes.rounds} rounds, memory of"
        f" {sizes.memory_rows} rows, of which {sizes.share_percent} % are guaranteed\nA flood stores"
        f" {sizes.flood_rows} new rows in each request, without a pause, and at least {sizes.flood_requests}"
        " requests before each one of the quiet tenant.\nLosses are the largest of all rounds (one round with"
        " all tiers)"
    )
