"""Measure the library's engine: store and retrieve of 2,048 tokens of an 8B model's KV, and a long lookup.

A repeated prompt stays in a large processor cache, and so does the memcpy that it is compared with. Both
figures are therefore too good. Several prompts in turn, with 1 GiB of KV, are closer to an engine that serves
many users. The benchmark reports both cases, each compared with a memcpy over as many buffers.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.report import Figure, Report, at_least, at_most, paired, spread
from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata

LAYERS, TOKENS, HEADS, HEAD_SIZE, CHUNK = 32, 2048, 8, 128, 256
TOTAL_BYTES = LAYERS * 2 * TOKENS * HEADS * HEAD_SIZE * 2
LOOKUP_TOKENS = 100_000
REPEATS = 15
PROMPTS = 4  # in turn


def make_engine(layers: int, heads: int, head_size: int) -> LMCacheEngine:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_device="cpu", max_local_cache_size=2, remote_url=None, remote_serde=None
    )
    shape = (layers, 2, CHUNK, heads, head_size)
    return LMCacheEngine(config, LMCacheEngineMetadata("model", 1, 0, "vllm", torch.float16, shape))


def timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def transfers(num_prompts: int) -> dict[str, list[float]]:
    """Return the seconds of each operation, in turn. The first rounds, which fault pages in, do not count."""
    engine = make_engine(LAYERS, HEADS, HEAD_SIZE)
    prompts = [torch.arange(TOKENS) + number for number in range(num_prompts)]
    shape = (TOKENS, HEADS, HEAD_SIZE)
    kvs = [
        tuple((torch.randn(shape).half(), torch.randn(shape).half()) for _ in range(LAYERS)) for _ in prompts
    ]
    sources, targets = ([np.ones(TOTAL_BYTES, np.uint8) for _ in prompts] for _ in range(2))
    results: deque[object] = deque(
        maxlen=num_prompts - 1
    )  # results in use, so that the next result gets other memory
    seconds: dict[str, list[float]] = {}

    def retrieve(tokens: torch.Tensor) -> None:
        results.append(engine.retrieve(tokens))

    for turn in range((REPEATS + 1) * num_prompts):
        number = turn % num_prompts
        tokens, kv = prompts[number], kvs[number]
        ways: dict[str, Callable[[], object]] = {
            "store": partial(engine.store, tokens, kv, skip_existing=False),
            "memcpy": partial(np.copyto, targets[number], sources[number]),
            "retrieve": partial(retrieve, tokens),
            "store of what is there": partial(engine.store, tokens, kv),
        }
        for name, way in ways.items():
            took = timed(way)
            if turn >= num_prompts:
                seconds.setdefault(name, []).append(took)
    engine.close()
    return seconds


def lookups() -> tuple[list[float], list[float]]:
    """Return the seconds of a lookup of 100,000 stored tokens, and of hashing them without a lookup."""
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
    looking, hashing = lookups()
    figures, spreads = [], []
    for num_prompts, what in ((PROMPTS, "prompts in turn"), (1, "one prompt again and again")):
        seconds = transfers(num_prompts)
        median = {name: statistics.median(samples) for name, samples in seconds.items()}
        share = {name: paired(seconds["memcpy"], seconds[name]) for name in ("store", "retrieve")}
        figures += [
            at_least(f"store, of memcpy, {what}", share["store"], "%", 50),
            at_least(f"retrieve, of memcpy, {what}", share["retrieve"], "%", 60),
            Figure(f"memcpy, {what}", TOTAL_BYTES / median["memcpy"] / 1e9, "GB/s"),
            Figure(f"store of what is there, {what}", 1e3 * median["store of what is there"], "ms"),
        ]
        spreads += [f"{name}, {what} {spread(samples)}" for name, samples in seconds.items()]
    figures += [
        at_most("lookup of 100,000 tokens, all there", 1e3 * statistics.median(looking), "ms", 3),
        Figure("hashing these tokens alone", 1e3 * statistics.median(hashing), "ms"),
    ]
    conditions = (
        f"{TOTAL_BYTES >> 20} MiB a prompt, {PROMPTS} prompts in turn: {LAYERS} layers, K and V "
        f"[{TOKENS}, {HEADS}, {HEAD_SIZE}] fp16, chunks of {CHUNK} tokens, {torch.get_num_threads()} torch "
        "threads; memcpy of one thread over as many buffers; " + ", ".join(spreads)
    )
    return Report("engine", conditions, figures)
