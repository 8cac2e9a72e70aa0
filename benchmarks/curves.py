"""How close a sampled miss-ratio curve comes to exact stack distances, and what it costs."""

from __future__ import annotations

import hashlib
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.clients.validation import parse_hello, parse_lookup
from lmcache_sidecar.samples import Samples

from benchmarks.clients import row_keys
from benchmarks.report import Figure, Report, at_most
from lmcache.curves import HASHES, Lookup, MissRatioCurve
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.attachment import hello_message
from lmcache.rpc.client import ClientHello, KVGroup, Role
from tools.simulate import Request, read_trace, stack_distances, tail_first

TRACES = Path(__file__).parent / "traces"
BLOCK_BYTES = 64 << 20
MAX_KEYS = 16_000
SAMPLES = 8  # independent ones: other hashes for the same blocks


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
        kept = [
            lookup._replace(keys=keys)
            for lookup in lookups
            if (keys := [key for key in lookup.keys if key < limit])
        ]
        num_kept = sum(len(lookup.keys) for lookup in kept)
        sampled = MissRatioCurve(MAX_KEYS, rate=curve.rate)
        seconds.append(_cpu_seconds(partial(sampled.feed, kept)) / num_kept)
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
    """Microseconds per sample where next to all keys are sampled, as with few and large rows."""
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
    """What a sidecar does with each request, before anybody asks for samples."""
    hello = ClientHello(Role.SCHEDULER, bytes(16), bytes(32), 256, (KVGroup(0, 16, 1 << 20),))
    peer = parse_hello(hello_message(hello, bytes(16)))
    asked = [
        pb.LookupRequest(request_id="r", groups=[pb.GroupKeys(keys=row_keys(number, 30))])
        for number in range(50)  # few: a sidecar's keys are in the processor's caches, it has just split them
    ]
    requests = [parse_lookup(request, peer) for request in asked] * 40
    scheduled = pb.Scheduled(num_engine_chunks=5, num_hit_chunks=20, num_loaded_tokens=15 * 256)
    for what, num_rows in (("all", 1600), ("a tenth", 16_000)):
        samples = Samples(Clients(Path()))

        def work(samples: Samples = samples, num_rows: int = num_rows) -> None:
            for chains in requests:
                samples.note(peer, chains, scheduled, num_rows, {})

        seconds = min(_cpu_seconds(work) for _ in range(9))
        yield at_most(f"sampling {what}, per key of 30 in a request", seconds / 60_000 * 1e6, "us", 0.2)


def _hash(turn: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(b"%d/%d" % (turn, block)).digest()[:8], "big")


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
