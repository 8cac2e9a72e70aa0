"""A poller with many clusters: pods of a cluster never delay other clusters."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lmcache_operator.autoscaling.intake.lookups import Intake
from lmcache_operator.autoscaling.intake.poller import Poller
from lmcache_operator.specs.kinds import ClusterKey

from lmcache.curves import HASHES, Lookup
from testing.workloads.requests import row_hash
from tests.harness.loops import in_a_loop
from tests.harness.polled_pods import many, rig


class CountingSidecars:
    """Sidecars that have no samples or hang, with a count of concurrent polls."""

    def __init__(self, hangs: Callable[[str], bool]) -> None:
        self.hangs = hangs
        self.num_running = self.max_concurrent = 0

    async def samples(self, address: str, question: object) -> Any:
        self.num_running += 1
        self.max_concurrent = max(self.max_concurrent, self.num_running)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.hangs(address):
            await asyncio.Event().wait()
        self.num_running -= 1

    async def read(self, address: str) -> Any:
        raise AssertionError


@asynccontextmanager
async def polling(sidecars: Any, clock: Callable[[], float]) -> AsyncIterator[Poller]:
    poller = Poller(sidecars, lambda key: None, clock=clock, poll_seconds=0.01)
    try:
        yield poller
    finally:
        await poller.close()


def clock(minutes: int = 15) -> Callable[[], float]:
    """A clock that advances at each read."""
    times = itertools.count(1.8e9, 60.0 * minutes)
    return lambda: next(times)


@pytest.mark.parametrize(("num_clusters", "num_pods", "max_concurrent"), [(1, 1000, 8), (8, 125, 32)])
@in_a_loop
async def test_pods_are_polled_with_limited_concurrency(num_clusters, num_pods, max_concurrent) -> None:
    sidecars = CountingSidecars(lambda _: False)
    async with rig() as poller_rig, polling(sidecars, clock()) as poller:
        observed = many(poller_rig.observed(), num_pods, "127.0.0.1")
        keys = [ClusterKey("default", "demo", f"many-{number}") for number in range(num_clusters)]
        reports = [
            await poller_rig.until(lambda key=key: poller.report(key, observed))
            for key in [key for key in keys if poller.report(key, observed) is None]
        ]
    assert sidecars.max_concurrent == max_concurrent
    for report in reports:
        expected = f"{num_pods} of {num_pods} pods return no usable samples (pod-0: "
        assert report.status["memory"]["reason"].startswith(expected)


@in_a_loop
async def test_silent_pods_are_reported_only_when_a_decision_is_due() -> None:
    """A starting cluster or operator must not report pods as silent too early."""
    sidecars, now = CountingSidecars(lambda _: False), [1.8e9]
    async with rig() as poller_rig, polling(sidecars, lambda: now[0]) as poller:
        key, observed = ClusterKey("default", "demo", "silent"), many(poller_rig.observed(), 1, "127.0.0.1")
        for _ in range(3):
            sidecars.max_concurrent = 0
            assert poller.report(key, observed) is None
            await poller_rig.until(lambda: sidecars.max_concurrent)
        now[0] += 900.0
        assert await poller_rig.until(lambda: poller.report(key, observed))


@in_a_loop
async def test_hanging_pods_delay_only_their_own_cluster() -> None:
    sidecars = CountingSidecars(lambda address: address == "127.0.0.9")
    async with rig() as poller_rig, polling(sidecars, clock()) as poller:
        hung, small = (many(poller_rig.observed(), 64, f"127.0.0.{number}") for number in (9, 1))
        key, other = (ClusterKey("default", name, name) for name in ("hung", "other"))
        poller.report(key, hung)
        await poller_rig.until(lambda: sidecars.num_running == 8)
        assert await poller_rig.until(lambda: poller.report(other, small))
        assert sidecars.num_running >= 8, "the hanging polls must not end"
        assert poller.report(key, hung) is None


class FloodingSidecars:
    """Sidecars that return too many samples, and a sidecar that returns few after that intake has begun."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.num_keys, self.num_polls = clock, 0, 0
        self.is_counting = asyncio.Event()

    async def samples(self, address: str, question: Mapping[str, int]) -> Any:
        if address == "127.0.0.4":
            number, size = 60, 1000
            self.num_polls += 1 / 4
        else:
            await self.is_counting.wait()
            number, size = 1, 10
        keys = [row_hash(self.num_keys, index) for index in range(size)] * number
        self.num_keys += len(keys)
        now = self.clock()
        return {
            "version": 1, "now": now, "started": 1.0, "namespace": "5f" * 32, "chunk_tokens": 256,
            "row_bytes": 32 << 20, "below": HASHES, "since": question["since"],
            "next": question["since"] + len(keys), "dropped": 0, "t0": now, "ms": [0] * number,
            "num": [size] * number, "key": "".join(f"{key:016x}" for key in keys),
        }  # fmt: skip

    async def read(self, address: str) -> Any:
        lookups = dict.fromkeys(("gpus", "prefill_tokens_per_second", "kv_bytes_per_token"), 1)
        lookups |= {"lookup_tokens": self.num_keys, "hit_tokens": {}, "engine_kv_bytes": 0}
        return {"memory": {"size_bytes": 64 << 30}, "lookups": lookups}


@in_a_loop
async def test_flooding_pods_take_turns_with_others_and_lose_samples(monkeypatch) -> None:
    batches: list[tuple[Intake, int]] = []
    feed, minutes = Intake._feed, clock(1)
    sidecars = FloodingSidecars(minutes)

    def count(intake: Intake, batch: Sequence[Lookup]) -> None:
        batches.append((intake, sum(len(lookup.keys) for lookup in batch)))
        if len(batches) > 3:
            sidecars.is_counting.set()
        feed(intake, batch)

    monkeypatch.setattr(Intake, "_feed", count)
    async with rig() as poller_rig, polling(sidecars, minutes) as poller:
        flooding, small = (many(poller_rig.observed(), number, f"127.0.0.{number}") for number in (4, 1))
        keys = [ClusterKey("default", name, name) for name in ("flood", "other")]
        for key, observed in zip(keys, (flooding, small), strict=True):
            poller.report(key, observed)
        flooded_intake, small_intake = (poller._watched[key.uid].sizing.intake for key in keys)

        def has_lost() -> bool:
            report = poller.report(keys[0], flooding)
            reason = "samples of pod-0 were lost before they were read"
            return bool(report and report.status["memory"]["reason"] == reason)

        await poller_rig.until(has_lost)
        assert await poller_rig.until(lambda: poller.report(keys[1], small))
    first_turn = [intake is small_intake for intake, _ in batches].index(True)
    assert first_turn < 40, "the small cluster gets a turn before all samples of the other one are counted"
    assert flooded_intake.num_samples <= 4 * 32_768 * sidecars.num_polls
