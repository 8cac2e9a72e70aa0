"""Workloads that are generated or read from a trace.

A row has ``TOKENS`` tokens. To save time, a workload may be ``scale`` times thinner than the service that it
represents: one of its rows represents ``scale`` rows. Sizes, money and time are those of the service.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.simulate import key_hash, read_trace

TOKENS = 512
KV_BYTES_PER_TOKEN = 128 << 10  # an 8B model with grouped-query attention
HOUR = 3600.0


@dataclass(frozen=True)
class Request:
    """One prompt."""

    time: float
    session: int
    """Requests of one session share a conversation as their prefix."""
    keys: tuple[int, ...]
    """Hashes of its rows, head first."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their time."""

    requests: Sequence[Request]
    scale: float = 1.0

    @property
    def tokens_per_row(self) -> float:
        return TOKENS * self.scale

    @property
    def row_bytes(self) -> float:
        return self.tokens_per_row * KV_BYTES_PER_TOKEN

    @property
    def hours(self) -> float:
        return self.requests[-1].time / HOUR

    def rows(self, size_bytes: float) -> int:
        """Number of rows that a size holds."""
        return int(size_bytes / self.row_bytes)


def row_hash(*path: int) -> int:
    """64 uniformly distributed bits (splitmix64) for a row that is identified by numbers."""
    value = 0
    for part in path:
        value = (value + part + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        value ^= value >> 31
    return value


def chat(
    hours: float, sessions_per_second: float, *, scale: float = 8.0, seed: int = 0, diurnal: float = 0.0,
    first: float = 6.0, think: float = 90.0, turns: float = 6.0, systems: int = 5,
) -> Workload:  # fmt: skip
    """Conversations with a system prompt (by Zipf's law), a first message, and turns. ``diurnal`` is the
    share by which more sessions begin at noon than on average."""
    rng = random.Random(seed)
    weights = [1 / (number + 1) for number in range(systems)]
    prompts = [[row_hash(1, seed, number, i) for i in range(rng.randint(1, 5))] for number in range(systems)]
    requests: list[Request] = []
    time, end = 0.0, hours * HOUR
    for session in range(10**9):
        time += rng.expovariate(sessions_per_second * (1 + diurnal) / scale)
        if time > end:
            break
        if rng.random() * (1 + diurnal) > 1 + diurnal * math.sin(2 * math.pi * (time / 86400 - 0.25)):
            continue
        prompt = rng.choices(prompts, weights)[0]
        requests += _session(rng, session, prompt, time, end, (seed, first, think, turns))
    return Workload(sorted(requests, key=lambda request: request.time), scale)


def _session(
    rng: random.Random, session: int, prompt: list[int], time: float, end: float,
    shape: tuple[int, float, float, float],
) -> Iterator[Request]:  # fmt: skip
    seed, first, think, turns = shape
    length = max(1, int(rng.lognormvariate(math.log(first), 0.9)))
    keys = list(prompt)
    while time <= end:
        keys += [row_hash(2, seed, session, len(keys) + i) for i in range(length)]
        yield Request(time, session, tuple(keys))
        time += rng.lognormvariate(math.log(think), 1.3)
        length = rng.randint(1, 3)
        if rng.random() < 1 / turns:
            return


def agents(hours: float, sessions_per_second: float, *, scale: float = 8.0, seed: int = 0) -> Workload:
    """Sessions of an agent: long prompts that grow at every step, with many steps at intervals of seconds."""
    return chat(
        hours, sessions_per_second, scale=scale, seed=seed, first=60.0, think=20.0, turns=40.0, systems=2
    )


def _steady(
    hours: float, rows_per_second: float, scale: float, keys: Callable[[int], Iterable[int]],
    period: int = 10**9,
) -> Workload:  # fmt: skip
    """Requests of ten rows at equal intervals, which repeat after ``period``."""
    seconds = 10 * scale / rows_per_second
    numbers = range(int(hours * HOUR / seconds))
    return Workload([Request(i * seconds, i % period, tuple(keys(i % period))) for i in numbers], scale)


def unique(hours: float, rows_per_second: float = 20.0, *, scale: float = 8.0, salt: int = 0) -> Workload:
    """Requests whose rows never repeat."""
    return _steady(hours, rows_per_second, scale, lambda i: (row_hash(3, salt, i, j) for j in range(10)))


def loop(hours: float, gib: float, rows_per_second: float = 20.0, *, scale: float = 8.0) -> Workload:
    """Requests that repeat the same ``gib`` in order: a smaller LRU cache hits nothing."""
    count = int(gib * 2**30 / (TOKENS * scale * KV_BYTES_PER_TOKEN) / 10)
    return _steady(hours, rows_per_second, scale, lambda i: (row_hash(4, i, j) for j in range(10)), count)


def uniform(hours: float, gib: float, rows_per_second: float = 20.0, *, scale: float = 8.0) -> Workload:
    """Requests for random documents with a total size of ``gib``."""
    rng = random.Random(0)
    count = int(gib * 2**30 / (TOKENS * scale * KV_BYTES_PER_TOKEN) / 10)

    def document(_: int) -> Iterator[int]:
        number = rng.randrange(count)
        return (row_hash(5, number, j) for j in range(10))

    return _steady(hours, rows_per_second, scale, document)


def documents(start: float, seconds: float, gib: float, count: int, *, scale: float = 8.0) -> Workload:
    """A flash crowd: ``count`` requests for 60 documents within ``seconds``."""
    rng = random.Random(1)
    rows = max(1, int(gib * 2**30 / 60 / (TOKENS * scale * KV_BYTES_PER_TOKEN)))
    times = sorted(start + rng.random() * seconds for _ in range(int(count / scale)))
    picked = [rng.randrange(60) for _ in times]
    return Workload(
        [
            Request(time, -i - 1, tuple(row_hash(6, number, j) for j in range(rows)))
            for i, (time, number) in enumerate(zip(times, picked, strict=True))
        ],
        scale,
    )


def shifted(workload: Workload, seconds: float) -> Workload:
    """The same workload, shifted in time."""
    requests = [
        Request(request.time + seconds, request.session, request.keys) for request in workload.requests
    ]
    return Workload(requests, workload.scale)


def together(*workloads: Workload) -> Workload:
    """Several workloads at the same time, with different sessions."""
    requests = [
        Request(request.time, request.session * len(workloads) + number, request.keys)
        for number, workload in enumerate(workloads)
        for request in workload.requests
    ]
    return Workload(sorted(requests, key=lambda request: request.time), workloads[0].scale)


def mooncake(path: Path, *, share: float = 1.0) -> Workload:
    """A trace in the Mooncake format. Requests that share a block other than the first form a session."""
    owners: dict[int, int] = {}
    hashes: dict[int, int] = {}
    requests = []
    for number, request in enumerate(read_trace(path)):
        known = (owners[block] for block in reversed(request.blocks[1:]) if block in owners)
        session = next(known, number)
        for block in request.blocks:
            owners.setdefault(block, session)
        if row_hash(7, session) < share * 2**64:
            keys = tuple(
                hashes.get(block) or hashes.setdefault(block, key_hash(block)) for block in request.blocks
            )
            requests.append(Request(request.seconds, session, keys))
    return Workload(requests, 1.0)


def repeated(workload: Workload, hours: int) -> Workload:
    """A workload of about an hour, repeated every hour with other sessions and other keys."""
    requests = []
    for number in range(hours):
        salt = row_hash(9, number)
        requests += [
            Request(
                request.time + number * HOUR,
                request.session * hours + number,
                tuple(key ^ salt for key in request.keys),
            )
            for request in workload.requests
        ]
    return Workload(sorted(requests, key=lambda request: request.time), workload.scale)
