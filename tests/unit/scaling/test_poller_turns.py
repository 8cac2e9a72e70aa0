"""Many clusters at one poller: none holds up the others, whatever its pods do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from lmcache_operator.scaling.intake import Intake
from lmcache_operator.scaling.poller import Poller
from lmcache_operator.specs.kinds import ClusterKey

from lmcache.curves import HASHES, Lookup
from testing.workloads.requests import row_hash
from tests.harness.polled_pods import in_a_loop, many, rig


class Counting:
    """Sidecars that never have an answer, at once, or ever."""

    def __init__(self, hangs: Callable[[str], bool]) -> None:
        self.hangs = hangs
        self.num_asked = self.most = 0

    async def samples(self, address: str, question: object) -> Any:
        self.num_asked += 1
        self.most = max(self.most, self.num_asked)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.hangs(address):
            await asyncio.Event().wait()
        self.num_asked -= 1

    async def read(self, address: str) -> Any:
        raise AssertionError


@pytest.mark.parametrize(("num_clusters", "num_pods", "most"), [(1, 1000, 8), (8, 125, 32)])
@in_a_loop
async def test_a_thousand_pods_are_asked_a_few_at_a_time(num_clusters, num_pods, most) -> None:
    async with rig() as found:
        sidecars = Counting(lambda _: False)
        minutes = itertools.count(1.8e9, 900.0)
        poller = Poller(sidecars, lambda key: None, clock=lambda: next(minutes), poll_seconds=0.01)
        observed = many(found.observed(), num_pods, "127.0.0.1")
        keys = [ClusterKey("default", "demo", f"many-{number}") for number in range(num_clusters)]
        try:
            reports = [
                await found.until(lambda key=key: poller.report(key, observed))
                for key in [key for key in keys if poller.report(key, observed) is None]
            ]
        finally:
            await poller.close()
        assert sidecars.most == most
        for report in reports:
            expected = f"{num_pods} of {num_pods} pods say nothing of use (pod-0: "
            assert report.status["memory"]["reason"].startswith(expected)


@in_a_loop
async def test_nothing_is_told_of_pods_that_never_answered_before_a_decision_is_due() -> None:
    """So that a cluster that starts, or an operator, tells of no silence that is none."""
    async with rig() as found:
        sidecars, now = Counting(lambda _: False), [1.8e9]
        poller = Poller(sidecars, lambda key: None, clock=lambda: now[0], poll_seconds=0.01)
        key, observed = ClusterKey("default", "demo", "silent"), many(found.observed(), 1, "127.0.0.1")
        try:
            for _ in range(3):
                sidecars.most = 0
                assert poller.report(key, observed) is None
                await found.until(lambda: sidecars.most)
            now[0] += 900.0
            assert await found.until(lambda: poller.report(key, observed))
        finally:
            await poller.close()


@in_a_loop
async def test_pods_that_hang_hold_up_their_own_cluster_only() -> None:
    async with rig() as found:
        sidecars = Counting(lambda address: address == "127.0.0.9")
        minutes = itertools.count(1.8e9, 900.0)
        poller = Poller(sidecars, lambda key: None, clock=lambda: next(minutes), poll_seconds=0.01)
        hung, other = many(found.observed(), 64, "127.0.0.9"), many(found.observed(), 64, "127.0.0.1")
        try:
            poller.report(ClusterKey("default", "hung", "hung"), hung)
            await found.until(lambda: sidecars.num_asked == 8)
            assert await found.until(lambda: poller.report(ClusterKey("default", "other", "other"), other))
            assert sidecars.num_asked >= 8, "they hang still"
            assert poller.report(ClusterKey("default", "hung", "hung"), hung) is None
        finally:
            await poller.close()


class Flood:
    """Sidecars that say far too much, and one that says little, once the others are being counted."""

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
        keys = [row_hash(self.num_keys, at) for at in range(size)] * number
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
        told = {"lookup_tokens": self.num_keys, "hit_tokens": {}, "engine_kv_bytes": 0} | lookups
        return {"memory": {"size_bytes": 64 << 30}, "lookups": told}


@in_a_loop
async def test_pods_that_flood_are_counted_by_turns_with_others_and_only_in_part(monkeypatch) -> None:
    async with rig() as found:
        minutes = itertools.count(1.8e9, 60.0)
        sidecars = Flood(lambda: next(minutes))
        poller = Poller(sidecars, lambda key: None, clock=lambda: next(minutes), poll_seconds=0.01)
        fed: list[tuple[Intake, int]] = []
        feed = Intake._feed

        def count(intake: Intake, batch: Sequence[Lookup]) -> None:
            fed.append((intake, sum(len(lookup.keys) for lookup in batch)))
            if len(fed) > 3:
                sidecars.is_counting.set()
            feed(intake, batch)

        monkeypatch.setattr(Intake, "_feed", count)
        flooding, other = (many(found.observed(), number, f"127.0.0.{number}") for number in (4, 1))
        keys = [ClusterKey("default", name, name) for name in ("flood", "other")]
        try:
            for key, observed in zip(keys, (flooding, other), strict=True):
                poller.report(key, observed)
            flooded, served = (poller._watched[key.uid].sizing.intake for key in keys)
            lost = "samples of pod-0 were lost before they were read"
            await found.until(
                lambda: (one := poller.report(keys[0], flooding)) and one.status["memory"]["reason"] == lost
            )
            assert await found.until(lambda: poller.report(keys[1], other))
        finally:
            await poller.close()
        first = [intake is served for intake, _ in fed].index(True)
        assert first < 40, "it waits for its turn, and not until all of the others are counted"
        assert flooded.num_samples <= 4 * 32_768 * sidecars.num_polls
