"""Measure the error of a sampled miss-ratio curve against exact stack distances, and its cost."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.clients.validation import parse_hello, parse_lookup
from lmcache_sidecar.explain.causes import Causes, Scheduled, find_blocking
from lmcache_sidecar.explain.sources import find_sources
from lmcache_sidecar.samples import Samples

from benchmarks.clients import row_keys
from benchmarks.report import Figure, Report, at_most, of
from lmcache.curves import HASHES, Lookup, MissRatioCurve
from lmcache.kv_groups import KVGroup
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.attachment import hello_message
from lmcache.rpc.hello import ClientHello, Role
from lmcache.tiers.memory.contracts import Chains, Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.tiered.store import TieredStore
from tools.simulate import Request, read_trace, stack_distances, tail_first

TRACES = Path(__file__).parent / "traces"
BLOCK_BYTES = 64 << 20
MAX_KEYS = 16_000
SAMPLES = 8  # independent: each hashes the same blocks differently


def run() -> Report:
    figures = []
    for name in ("conversation", "synthetic"):
        figures += _figures(name, list(read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz")))
    figures += _sampling()
    return Report(
        "curves", f"at most {MAX_KEYS} tracked keys, {SAMPLES} independent samples, at 100 sizes", figures
    )


def _figures(name: str, requests: list[Request]) -> list[Figure]:
    exact = _exact(requests)
    errors, worst, seconds = [], [], []
    for turn in range(SAMPLES):
        lookups = [
            Lookup(request.seconds, [_hash(turn, block) for block in reversed(request.blocks)], BLOCK_BYTES)
            for request in requests
        ]
        curve = MissRatioCurve(MAX_KEYS)
        curve.feed(lookups)
        curve.count_accesses(sum(len(request.blocks) for request in requests))
        differences = [100 * abs(curve.hit_ratio(size).hit_ratio - ratio) for size, ratio in exact.items()]
        errors.append(statistics.mean(differences))
        worst.append(max(differences))
        limit = curve.rate * HASHES
        sampled_lookups = [
            lookup._replace(keys=keys)
            for lookup in lookups
            if (keys := [key for key in lookup.keys if key < limit])
        ]
        num_sampled = sum(len(lookup.keys) for lookup in sampled_lookups)
        sampled = MissRatioCurve(MAX_KEYS, rate=curve.rate)
        seconds.append(_cpu_seconds(partial(sampled.feed, sampled_lookups)) / num_sampled)
    tracemalloc.start()
    curve = MissRatioCurve(MAX_KEYS)
    curve.feed(lookups)
    mebibytes = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    return [
        at_most(f"{name}: mean error, mean of the samples", statistics.mean(errors), "hit points", 0.5),
        Figure(f"{name}: mean error, worst sample", max(errors), "hit points"),
        Figure(f"{name}: largest error at any size", max(worst), "hit points"),
        at_most(f"{name}: feeding, per kept sample", statistics.median(seconds) * 1e6, "us", 2.0),
        Figure(f"{name}: feeding, all keys sampled", _feeding_all(lookups), "us per sample"),
        at_most(f"{name}: memory", mebibytes, "MiB", 4.0),
    ]


def _feeding_all(lookups: list[Lookup]) -> float:
    """Return the microseconds per sample if nearly all keys are sampled, as with few and large rows."""
    num_samples = sum(len(lookup.keys) for lookup in lookups)
    return 1e6 * _cpu_seconds(partial(MissRatioCurve(10**6, rate=0.999).feed, lookups)) / num_samples


def _exact(requests: list[Request]) -> dict[int, float]:
    distances = stack_distances(tail_first(requests))
    num_blocks = len({block for request in requests for block in request.blocks})
    ratios = {}
    for percent in range(1, 101):
        rows = num_blocks * percent // 100
        ratios[rows * BLOCK_BYTES] = sum(0 < distance <= rows for distance in distances) / len(distances)
    return ratios


def _sampling() -> Iterator[Figure]:
    """Measure the work of a sidecar for each request, before a client reads samples."""
    hello = ClientHello(Role.SCHEDULER, bytes(16), bytes(32), 256, (KVGroup(0, 16, 1 << 20),))
    peer = parse_hello(hello_message(hello, bytes(16)))
    asked = [
        pb.LookupRequest(request_id="r", groups=[pb.GroupKeys(keys=row_keys(number, 30))])
        for number in range(
            50
        )  # few, because a sidecar's keys are in the processor's caches: it has just split them
    ]
    requests = [parse_lookup(request, peer) for request in asked] * 40
    scheduled = pb.Scheduled(num_engine_chunks=5, num_hit_chunks=20, num_loaded_tokens=15 * 256)
    for what, num_rows in (("all", 1600), ("a tenth", 16_000)):
        samples = Samples(Clients(Path()))

        def work(samples: Samples = samples, num_rows: int = num_rows) -> None:
            for chains in requests:
                sources = find_sources(chains, scheduled, {})
                samples.note(peer, chains, sources, 15 * 256, num_rows)

        seconds = min(_cpu_seconds(work) for _ in range(9))
        yield at_most(f"sampling {what}, per key of 30 in a request", seconds / 60_000 * 1e6, "us", 0.2)
    yield from asyncio.run(_explaining(requests, scheduled))


async def _explaining(requests: Sequence[Chains], message: pb.Scheduled) -> list[Figure]:
    """Measure what the causes of a request cost: in the engine's call, and afterwards."""
    store = TieredStore(PrivateArena(Geometry(1 << 20, 1), 1))
    causes = Causes(lambda seconds, action: None)
    known = [(chains, find_sources(chains, message, {})) for chains in requests]

    def queue() -> None:
        for chains, sources in known:
            blocking = find_blocking(chains, len(sources), "r", store.absence, store.history.is_stored)
            causes.note(Scheduled(0.0, "r", chains, message, sources, store.history, blocking))

    seconds = [(_cpu_seconds(queue), _cpu_seconds(causes.settle)) for _ in range(9)]
    await store.close()
    in_call, after = (min(column) / len(known) * 1e6 for column in zip(*seconds, strict=True))
    return [
        at_most("causes in the call, per key of 30 in a request", in_call / 30, "us", 0.2),
        of("causes after the call, per request of 30 keys", after, "us"),
    ]


def _hash(turn: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(b"%d/%d" % (turn, block)).digest()[:8], "big")


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
