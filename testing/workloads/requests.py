"""Workloads: generated, or read from a trace.

A row is ``TOKENS`` tokens. To be quick, a workload may be ``scale`` times thinner than the service that it
stands for: one of its rows is then ``scale`` rows. Sizes, money and time stay what they are.
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
    """Requests of one session have one conversation as their prefix."""
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
        """How many rows such a size holds."""
        return int(size_bytes / self.row_bytes)


def row_hash(*path: int) -> int:
    """64 uniformly distributed bits (splitmix64) for a row that is named by numbers."""
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
    """Conversations: a system prompt (by Zipf's law), a first message, and turns. ``diurnal``: how much more
    sessions begin at noon than on average, as a share."""
    chance = random.Random(seed)
    weights = [1 / (number + 1) for number in range(systems)]
    prompts = [
        [row_hash(1, seed, number, i) for i in range(chance.randint(1, 5))] for number in range(systems)
    ]
    requests: list[Request] = []
    time, end = 0.0, hours * HOUR
    for session in range(10**9):
        time += chance.expovariate(sessions_per_second * (1 + diurnal) / scale)
        if time > end:
            break
        if chance.random() * (1 + diurnal) > 1 + diurnal * math.sin(2 * math.pi * (time / 86400 - 0.25)):
            continue
        prompt = chance.choices(prompts, weights)[0]
        requests += _session(chance, session, prompt, time, end, (seed, first, think, turns))
    return Workload(sorted(requests, key=lambda request: request.time), scale)


def _session(
    chance: random.Random, session: int, prompt: list[int], time: float, end: float,
    shape: tuple[int, float, float, float],
) -> Iterator[Request]:  # fmt: skip
    seed, first, think, turns = shape
    length = max(1, int(chance.lognormvariate(math.log(first), 0.9)))
    keys = list(prompt)
    while time <= end:
        keys += [row_hash(2, seed, session, len(keys) + i) for i in range(length)]
        yield Request(time, session, tuple(keys))
        time += chance.lognormvariate(math.log(think), 1.3)
        length = chance.randint(1, 3)
        if chance.random() < 1 / turns:
            return


def agents(hours: float, sessions_per_second: float, *, scale: float = 8.0, seed: int = 0) -> Workload:
    """Sessions of an agent: long prompts that grow at every step, many steps, seconds apart."""
    return chat(
        hours, sessions_per_second, scale=scale, seed=seed, first=60.0, think=20.0, turns=40.0, systems=2
    )


def _steady(
    hours: float, rows_per_second: float, scale: float, keys: Callable[[int], Iterable[int]],
    period: int = 10**9,
) -> Workload:  # fmt: skip
    """Requests of ten rows at equal intervals, which begin anew after ``period``."""
    seconds = 10 * scale / rows_per_second
    numbers = range(int(hours * HOUR / seconds))
    return Workload([Request(i * seconds, i % period, tuple(keys(i % period))) for i in numbers], scale)


def unique(hours: float, rows_per_second: float = 20.0, *, scale: float = 8.0, salt: int = 0) -> Workload:
    """Nothing ever comes back."""
    return _steady(hours, rows_per_second, scale, lambda i: (row_hash(3, salt, i, j) for j in range(10)))


def loop(hours: float, gib: float, rows_per_second: float = 20.0, *, scale: float = 8.0) -> Workload:
    """The same ``gib`` over and over: a smaller LRU cache hits nothing."""
    count = int(gib * 2**30 / (TOKENS * scale * KV_BYTES_PER_TOKEN) / 10)
    return _steady(hours, rows_per_second, scale, lambda i: (row_hash(4, i, j) for j in range(10)), count)


def uniform(hours: float, gib: float, rows_per_second: float = 20.0, *, scale: float = 8.0) -> Workload:
    """Documents that together are so large, at random."""
    chance = random.Random(0)
    count = int(gib * 2**30 / (TOKENS * scale * KV_BYTES_PER_TOKEN) / 10)

    def document(_: int) -> Iterator[int]:
        number = chance.randrange(count)
        return (row_hash(5, number, j) for j in range(10))

    return _steady(hours, rows_per_second, scale, document)


def documents(start: float, seconds: float, gib: float, count: int, *, scale: float = 8.0) -> Workload:
    """A flash crowd: ``count`` requests for 60 documents within a while."""
    chance = random.Random(1)
    rows = max(1, int(gib * 2**30 / 60 / (TOKENS * scale * KV_BYTES_PER_TOKEN)))
    times = sorted(start + chance.random() * seconds for _ in range(int(count / scale)))
    picked = [chance.randrange(60) for _ in times]
    return Workload(
        [
            Request(time, -i - 1, tuple(row_hash(6, number, j) for j in range(rows)))
            for i, (time, number) in enumerate(zip(times, picked, strict=True))
        ],
        scale,
    )


def shifted(workload: Workload, seconds: float) -> Workload:
    """The same, later."""
    requests = [
        Request(request.time + seconds, request.session, request.keys) for request in workload.requests
    ]
    return Workload(requests, workload.scale)


def together(*workloads: Workload) -> Workload:
    """Several at once; sessions of different ones are different."""
    requests = [
        Request(request.time, request.session * len(workloads) + number, request.keys)
        for number, workload in enumerate(workloads)
        for request in workload.requests
    ]
    return Workload(sorted(requests, key=lambda request: request.time), workloads[0].scale)


def mooncake(path: Path, *, share: float = 1.0) -> Workload:
    """A trace of the Mooncake format; a session is what shares a block that is not the first."""
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
    """A workload of about an hour, hour after hour: each time other sessions, with keys of their own."""
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
