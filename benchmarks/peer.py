"""Compare with upstream's packages from the registry, each in a separate environment.

lmcache 0.3.0 is the last release with the library's engine. Of 0.5.6, the benchmark times the native Redis
client. Rounds alternate, so that a change of the machine's speed affects both. Each round stores a new
prompt. The first rounds fill the caches of 1 GB and fault their memory in, so they do not count.
"""

from __future__ import annotations

import os
import statistics
from contextlib import closing
from functools import partial

import torch

from benchmarks import engine as ours
from benchmarks.peers.child import Peer
from benchmarks.report import Figure, Report, at_least
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.tier import RemoteTier
from testing.processes import RedisProcess

WARM_UP, ROUNDS = 5, 9
NUM_PARTS = 32

Rounds = list[tuple[dict[str, float], dict[str, float]]]
"""Seconds of the peer and of this project, by operation."""


def run() -> Report:
    return Report(
        "peer",
        f"lmcache 0.3.0 and 0.5.6, torch {torch.__version__}, {ROUNDS} alternating rounds, medians",
        [*_against_legacy(), *_against_resp()],
    )


def _against_legacy() -> list[Figure]:
    tokens = torch.arange(ours.TOKENS)
    layer = [torch.randn(ours.TOKENS, ours.HEADS, ours.HEAD_SIZE).half() for _ in range(2 * ours.LAYERS)]
    kv = tuple(zip(layer[::2], layer[1::2], strict=True))
    engine = ours.make_engine(ours.LAYERS, ours.HEADS, ours.HEAD_SIZE)
    shape = (ours.LAYERS, ours.TOKENS, ours.HEADS, ours.HEAD_SIZE, ours.CHUNK)
    rounds = []
    with Peer("0.3.0", "legacy.py", *shape) as peer, closing(engine):
        for turn in range(WARM_UP + ROUNDS):
            prompt = tokens + turn * ours.TOKENS
            theirs = peer.round()
            mine = {
                "store": ours.timed(partial(engine.store, prompt, kv)),
                "retrieve": ours.timed(partial(engine.retrieve, prompt)),
            }
            rounds.append((theirs, mine))
    return [
        *_ratios("engine store, of lmcache 0.3.0", "store", rounds[WARM_UP:], 10, ours.TOTAL_BYTES),
        *_ratios("engine retrieve, of lmcache 0.3.0", "retrieve", rounds[WARM_UP:], 3, ours.TOTAL_BYTES),
    ]


def _against_resp() -> list[Figure]:
    with RedisProcess() as server:
        tcp, socket = _remote_rounds(server, server.url), _remote_rounds(server, server.unix_url)
    num_bytes = NUM_PARTS * PART_BYTES
    peer, ours_only = (
        "of the resp client of lmcache 0.5.6",
        "the same, ours over a UNIX socket (theirs has none)",
    )
    return [
        *_ratios(f"remote load, {peer}", "load", tcp, 1.3, num_bytes),
        *_ratios(f"    {ours_only}", "load", socket, 1.3, num_bytes)[::2],
        *_ratios(f"remote store, {peer}", "store", tcp, 2, num_bytes),
        *_ratios(f"    {ours_only}", "store", socket, 2, num_bytes)[::2],
    ]


def _remote_rounds(server: RedisProcess, url: str) -> Rounds:
    num_bytes = NUM_PARTS * PART_BYTES
    source, target = memoryview(os.urandom(num_bytes)), memoryview(bytearray(num_bytes))
    rounds = []
    remote = RemoteTier(Address.parse(url), timeout_seconds=10)
    with Peer("0.5.6", "resp.py", server.port, NUM_PARTS, PART_BYTES) as peer, closing(remote):
        for turn in range(1 + ROUNDS):
            key = turn.to_bytes(64, "big")  # the tier does not write an existing object again
            theirs = peer.round()
            mine = {
                "store": ours.timed(partial(remote.store, ObjectId(key, 0), source)),
                "load": ours.timed(partial(remote.load, ObjectId(key, 0), target)),
            }
            if target != source:
                raise RuntimeError("the remote tier did not return what was stored")
            rounds.append((theirs, mine))
            server.client.flushall()
    return rounds[1:]


def _ratios(what: str, name: str, rounds: Rounds, bar: float, num_bytes: int) -> list[Figure]:
    speedup = statistics.median(theirs[name] / mine[name] for theirs, mine in rounds)
    rates = [
        num_bytes / statistics.median(seconds[name] for seconds in side) / 1e9
        for side in zip(*rounds, strict=True)
    ]
    return [
        at_least(what, speedup, "x", bar),
        Figure("    theirs", rates[0], "GB/s"),
        Figure("    ours", rates[1], "GB/s"),
    ]
