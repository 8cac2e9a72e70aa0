"""What a change of the shards of the remote tier costs: hits before and after, on real servers that evict.

Rows are asked for by a Zipf law; what is not found is computed, that is stored; what is found at its former
shard is stored again, as the tiered store does. Without a list of former shards every row that moves is lost.
No more than the share of the requests whose rows move may be lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate, compress

from benchmarks import evicted
from benchmarks.report import Figure, Report, at_most
from lmcache.tiers.base import ObjectId
from lmcache.tiers.remote.address import Address, Endpoint
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList
from testing.child_process import wait_until
from testing.processes import RedisProcess

NUM_ROWS, PAYLOAD_BYTES, SHARD_BYTES = 6_000, 24 << 10, 24 << 20
WARM_UP, WINDOW = 15_000, 3_000
"""Requests of one row."""
TRANSITIONS = (3, 4), (4, 3), (1, 2), (2, 1)
WEIGHTS: list[float] = [1 / (rank + 1) ** 0.8 for rank in range(NUM_ROWS)]
CUMULATED = list(accumulate(WEIGHTS))
NOISE_POINTS = 2.0
"""A window has so many hits more or less by chance."""
KEYS = [number.to_bytes(64, "big") for number in range(NUM_ROWS)]


class Traffic:
    """The same requests for everybody, from a seed."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._random = random.Random(7)
        self._payload = memoryview(os.urandom(PAYLOAD_BYTES))
        self._slot = memoryview(bytearray(PAYLOAD_BYTES))

    def hits(self, number: int) -> float:
        """Ask that often; the share that was found."""
        found = 0
        for key in self._random.choices(KEYS, cum_weights=CUMULATED, k=number):
            loaded = self._tier.load(ObjectId(key, 0), self._slot)
            found += loaded is not None
            if loaded is None or loaded.is_misplaced:
                self._tier.store(ObjectId(key, 0), self._payload)
        return found / number


@contextlib.contextmanager
def tier_of(servers: list[RedisProcess], number: int) -> Iterator[tuple[RemoteTier, Traffic]]:
    """One that uses the first of these servers; all of them are empty."""
    for server in servers:
        server.client.flushall()
    url = ",".join(f"127.0.0.1:{server.port}" for server in servers[:number])
    tier = RemoteTier(Address.parse(f"redis://{url}"), timeout_seconds=60)
    yield tier, Traffic(tier)
    tier.close()


def endpoints(servers: list[RedisProcess]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint("127.0.0.1", server.port) for server in servers)


def owners(tier: RemoteTier) -> list[str]:
    return [tier._topology.owners(ObjectId(key, 0))[0].name for key in KEYS]


def share(is_concerned: Iterable[bool]) -> float:
    """Of the requests, in per cent."""
    concerned: float = sum(compress(WEIGHTS, is_concerned))
    return 100 * concerned / CUMULATED[-1]


def change(
    servers: list[RedisProcess], old: int, new: int, *, has_list: bool
) -> tuple[float, float, list[float]]:
    """The share of requests whose rows move, hits before a change and in three windows after it; the former
    shards are read in the first two of these."""
    with tier_of(servers, old) as (tier, traffic):
        traffic.hits(WARM_UP)
        before, owned = traffic.hits(WINDOW), owners(tier)
        current, previous = endpoints(servers[:new]), endpoints(servers[:old])
        tier.set_shards(ShardList(current, previous if has_list else (), time.time() + 9000))
        moving = share(was != is_now for was, is_now in zip(owned, owners(tier), strict=True))
        after = [traffic.hits(WINDOW), traffic.hits(WINDOW)]
        tier.set_shards(ShardList(current))
        return moving, before, [*after, traffic.hits(WINDOW)]


def loss(servers: list[RedisProcess]) -> tuple[float, float, float, float]:
    """The share of requests for one of three servers, hits before it dies, while it is away, and then."""
    with tier_of(servers, 3) as (tier, traffic):
        traffic.hits(WARM_UP)
        before, owned = traffic.hits(WINDOW), owners(tier)
        servers[0].kill()
        away = traffic.hits(WINDOW)
        servers[0].start()
        _wait_for_all(tier)
        gone = str(endpoints(servers)[0])
        concerned = share(name == gone for name in owned)
        return concerned, before, away, traffic.hits(WINDOW)


def refitted(servers: list[RedisProcess]) -> Iterator[tuple[float, float, float]]:
    """Three servers get twice the memory, one after the other: of each the share of requests that it answers,
    hits in the window before it is replaced, and in that after, a tenth of which it is away."""
    with tier_of(servers, 3) as (tier, traffic):
        traffic.hits(WARM_UP)
        owned = owners(tier)
        for server in servers[:3]:
            before = traffic.hits(WINDOW)
            server.kill()
            away = traffic.hits(WINDOW // 10)
            server.start()
            server.client.config_set("maxmemory", 2 * SHARD_BYTES)
            _wait_for_all(tier)
            after = (away + 9 * traffic.hits(WINDOW - WINDOW // 10)) / 10
            yield share(name == f"127.0.0.1:{server.port}" for name in owned), before, after
    for server in servers[:3]:
        server.client.config_set("maxmemory", SHARD_BYTES)


def _wait_for_all(tier: RemoteTier) -> None:
    wait_until(lambda: all(not server.circuit.is_open for server in tier._topology.servers()), timeout=60)


def lost(before: float, after: float) -> float:
    """Per cent of the hits."""
    return 100 * (before - after) / before


def run() -> Report:
    figures = list(evicted.figures())
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(RedisProcess(maxmemory=SHARD_BYTES, maxmemory_policy="allkeys-lru"))
            for _ in range(4)
        ]
        for old, new in TRANSITIONS:
            name = f"{old} to {new} shards"
            moving, before, after = change(servers, old, new, has_list=True)
            _, _, without = change(servers, old, new, has_list=False)
            figures += [
                Figure(f"{name}: hits before", 100 * before, "%"),
                at_most(
                    f"{name}: hits lost in the first window",
                    lost(before, after[0]),
                    "%",
                    moving + NOISE_POINTS,
                ),
                Figure(f"{name}: in the second", lost(before, after[1]), "%"),
                Figure(f"{name}: when the former are not read any more", lost(before, after[2]), "%"),
                Figure(f"{name}: in the first window, without a list", lost(before, without[0]), "%"),
            ]
        concerned, before, away, back = loss(servers)
        figures += [
            at_most(
                "one of 3 lost: hits lost while it is away", lost(before, away), "%", concerned + NOISE_POINTS
            ),
            Figure("one of 3 lost: when it is back, empty", lost(before, back), "%"),
        ]
        for number, (concerned, before, filling) in enumerate(refitted(servers), 1):
            name = f"memory of 3 doubled, one by one: hits lost in the window of number {number}"
            figures.append(at_most(name, lost(before, filling), "%", concerned + NOISE_POINTS))
    conditions = (
        f"rows of engines: one shard of {evicted.SERVER_BYTES >> 20} MiB; changes: {NUM_ROWS} small "
        f"rows, shards of {SHARD_BYTES >> 20} MiB that evict, windows of {WINDOW} requests"
    )
    return Report("shards", conditions, figures)
