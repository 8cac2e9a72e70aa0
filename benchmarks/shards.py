"""Measure the hits that a change of the shards costs, on real servers that evict.

Requests for rows follow a Zipf law. The benchmark stores each row that it misses. It also stores a row again
that it finds at its former shard, as the tiered store does. Without a list of former shards, each row that
moves is a miss. The bar for lost hits is the share of requests whose rows move.
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
"""Numbers of requests, each for one row."""
TRANSITIONS = (3, 4), (4, 3), (1, 2), (2, 1)
WEIGHTS: list[float] = [1 / (rank + 1) ** 0.8 for rank in range(NUM_ROWS)]
CUMULATED = list(accumulate(WEIGHTS))
NOISE_POINTS = 2.0
"""Random variation of the hits in a window, in per cent."""
KEYS = [number.to_bytes(64, "big") for number in range(NUM_ROWS)]


class Traffic:
    """Requests from a fixed seed, the same in every run."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._random = random.Random(7)
        self._payload = memoryview(os.urandom(PAYLOAD_BYTES))
        self._slot = memoryview(bytearray(PAYLOAD_BYTES))

    def hits(self, number: int) -> float:
        """Send ``number`` requests. Returns the share of hits."""
        num_hits = 0
        for key in self._random.choices(KEYS, cum_weights=CUMULATED, k=number):
            loaded = self._tier.load(ObjectId(key, 0), self._slot)
            num_hits += loaded is not None
            if loaded is None or loaded.is_misplaced:
                self._tier.store(ObjectId(key, 0), self._payload)
        return num_hits / number


@contextlib.contextmanager
def tier_of(servers: list[RedisProcess], number: int) -> Iterator[tuple[RemoteTier, Traffic]]:
    """Create a tier on the first ``number`` servers, after clearing all servers."""
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
    """Return the share of requests for rows that are concerned, in per cent."""
    concerned: float = sum(compress(WEIGHTS, is_concerned))
    return 100 * concerned / CUMULATED[-1]


def change(
    servers: list[RedisProcess], old: int, new: int, *, has_list: bool
) -> tuple[float, float, list[float]]:
    """Return the share of requests whose rows move, and hits before a change and in three windows after it.

    The tier reads the former shards in the first two windows.
    """
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
    """Return the share of requests for one of three servers, and hits before, during and after its outage."""
    with tier_of(servers, 3) as (tier, traffic):
        traffic.hits(WARM_UP)
        before, owned = traffic.hits(WINDOW), owners(tier)
        servers[0].kill()
        away = traffic.hits(WINDOW)
        servers[0].start()
        _wait_for_all(tier)
        killed = str(endpoints(servers)[0])
        concerned = share(name == killed for name in owned)
        return concerned, before, away, traffic.hits(WINDOW)


def refitted(servers: list[RedisProcess]) -> Iterator[tuple[float, float, float]]:
    """Double the memory of three servers, one after another.

    Yields for each server its share of the requests, and the hits in the windows before and after its
    replacement. The server is down in the first tenth of the second window.
    """
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
    """Return the lost hits, in per cent of the hits before."""
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
                Figure(f"{name}: after reads of the former shards end", lost(before, after[2]), "%"),
                Figure(f"{name}: in the first window, without a list", lost(before, without[0]), "%"),
            ]
        concerned, before, away, back = loss(servers)
        figures += [
            at_most(
                "one of 3 servers down: hits lost during the outage",
                lost(before, away),
                "%",
                concerned + NOISE_POINTS,
            ),
            Figure("one of 3 servers down: hits lost after its return, empty", lost(before, back), "%"),
        ]
        for number, (concerned, before, filling) in enumerate(refitted(servers), 1):
            name = f"memory of 3 doubled, one by one: hits lost in the window of number {number}"
            figures.append(at_most(name, lost(before, filling), "%", concerned + NOISE_POINTS))
    conditions = (
        f"rows of engines: one shard of {evicted.SERVER_BYTES >> 20} MiB; changes: {NUM_ROWS} small "
        f"rows, shards of {SHARD_BYTES >> 20} MiB that evict, windows of {WINDOW} requests"
    )
    return Report("shards", conditions, figures)
