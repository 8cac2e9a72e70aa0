"""The library's engine: 2,048 tokens of an 8B model's KV stored and retrieved, and a long lookup."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Figure, Report, at_least, at_most, spread
from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata

LAYERS, TOKENS, HEADS, HEAD_SIZE, CHUNK = 32, 2048, 8, 128, 256
TOTAL_BYTES = LAYERS * 2 * TOKENS * HEADS * HEAD_SIZE * 2
LOOKUP_TOKENS = 100_000
REPEATS = 15


def make_engine(layers: int, heads: int, head_size: int) -> LMCacheEngine:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_device="cpu", max_local_cache_size=1, remote_url=None, remote_serde=None
    )
    shape = (layers, 2, CHUNK, heads, head_size)
    return LMCacheEngine(config, LMCacheEngineMetadata("model", 1, 0, "vllm", torch.float16, shape))


def timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def transfers() -> dict[str, list[float]]:
    """Seconds of each way, taken in turns. The first round, which faults the pages in, is not counted."""
    engine = make_engine(LAYERS, HEADS, HEAD_SIZE)
    tokens = torch.arange(TOKENS)
    kv = tuple(
        (torch.randn(TOKENS, HEADS, HEAD_SIZE).half(), torch.randn(TOKENS, HEADS, HEAD_SIZE).half())
        for _ in range(LAYERS)
    )
    source, target = np.ones(TOTAL_BYTES, np.uint8), np.ones(TOTAL_BYTES, np.uint8)
    ways: dict[str, Callable[[], object]] = {
        "store": lambda: engine.store(tokens, kv, skip_existing=False),
        "memcpy": lambda: np.copyto(target, source),
        "retrieve": lambda: engine.retrieve(tokens),
        "store of what is there": lambda: engine.store(tokens, kv),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            took = timed(way)
            if repeat:
                seconds[name].append(took)
    engine.close()
    return seconds


def lookups() -> tuple[list[float], list[float]]:
    """Seconds of a lookup of 100,000 tokens that are all there, and of hashing them alone."""
    engine = make_engine(1, 1, 4)
    tokens = torch.arange(LOOKUP_TOKENS)
    half = torch.zeros(LOOKUP_TOKENS, 1, 4, dtype=torch.float16)
    engine.store(tokens, ((half, half),))
    assert engine.lookup(tokens) == LOOKUP_TOKENS
    raw = tokens.numpy().tobytes()

    def hash_only() -> None:
        before = ""
        for start in range(0, len(raw), CHUNK * 8):
            before = hashlib.sha256(before.encode() + raw[start : start + CHUNK * 8]).hexdigest()

    pairs = [(timed(lambda: engine.lookup(tokens)), timed(hash_only)) for _ in range(REPEATS * 4)]
    engine.close()
    return [lookup for lookup, _ in pairs], [hashing for _, hashing in pairs]


def run() -> Report:
    seconds = transfers()
    looking, hashing = lookups()
    memcpy = statistics.median(seconds["memcpy"])
    share = {name: 100 * memcpy / statistics.median(seconds[name]) for name in ("store", "retrieve")}
    figures = [
        at_least("store, of memcpy", share["store"], "%", 50),
        at_least("retrieve, of memcpy", share["retrieve"], "%", 60),
        at_most("lookup of 100,000 tokens, all there", 1e3 * statistics.median(looking), "ms", 3),
        Figure("hashing these tokens alone", 1e3 * statistics.median(hashing), "ms"),
        Figure("memcpy", TOTAL_BYTES / memcpy / 1e9, "GB/s"),
        Figure("store of what is there", 1e3 * statistics.median(seconds["store of what is there"]), "ms"),
    ]
    conditions = (
        f"{TOTAL_BYTES >> 20} MiB: {LAYERS} layers, K and V [{TOKENS}, {HEADS}, {HEAD_SIZE}] fp16, "
        f"chunks of {CHUNK} tokens, {torch.get_num_threads()} torch threads; memcpy of one thread; "
        + ", ".join(f"{name} {spread(samples)}" for name, samples in seconds.items())
    )
    return Report("engine", conditions, figures)
