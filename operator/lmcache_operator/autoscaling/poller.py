"""The poller: asks sidecars for samples, and wakes clusters whose decision changed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from lmcache_operator.api.autoscaling import AUTO, OFF
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.autoscaling.intake.answers import figures as parsed_figures
from lmcache_operator.autoscaling.intake.lookups import NoAnswer, TimedAnswer
from lmcache_operator.autoscaling.sizing import (
    POLL_SECONDS,
    STALE_SECONDS,
    Situation,
    Sizing,
    SizingSettings,
    UnavailableSize,
)
from lmcache_operator.components.autoscaling.component import saved
from lmcache_operator.components.remote.remote import listed_shards, why_filling, why_never_ready
from lmcache_operator.contract.base import Observed
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.pods.pods import is_outdated, is_ready, why_unplaced
from lmcache_operator.pods.resize import RefusedResize, initial_bytes, largest_in_place
from lmcache_operator.policy.decide import DECIDE_SECONDS
from lmcache_operator.policy.report import Report, steady
from lmcache_operator.policy.state import Obstacle
from lmcache_operator.policy.tier import Prices
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.probe import has_running_sidecar
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.stats import StatsClient
from lmcache_store.common.text import plain
from lmcache_store.curves import answers as parsing

_NUM_WORKERS = 16
"""Clusters that are polled at the same time."""
_MAX_REQUESTS, _MAX_REQUESTS_OF_A_CLUSTER = 32, 8
"""Requests at the same time, in all and for one cluster. A thousand quick sidecars take seconds, the memory
for answers is bounded, and sidecars that hang delay only their own cluster."""
_MAX_KEYS, _MAX_KEYS_OF_A_CLUSTER = 800_000, 64_000
"""Tracked keys, in all and of one cluster. A key takes about 200 bytes."""
_KEYS_OF_A_POD, _KEYS_OF_A_POLL = 32_768, 1 << 19
"""Keys read from one answer, and from all answers of a cluster in one poll. A key takes 8 to 24 bytes until
all pods of a cluster have answered.

A sidecar's ring of 65,536 keys lasts for eight minutes, so an answer usually has a quarter of this limit. A
sidecar that looks up 20,000 tokens a second reaches the limit after seven minutes."""


@dataclass
class _Watched:
    """One polled cluster."""

    key: ClusterKey
    situation: Situation
    addresses: Mapping[str, str]
    """Addresses of its sidecars, by the uids of their pods."""
    sizing: Sizing
    since: float
    """Start of polling. Until a sidecar answers, the first decision waits for a while."""
    has_answered: bool = False
    report: Report | None = None
    is_started: bool = field(default=False)


class Poller:
    """The autoscaler of all clusters. The reconciler registers clusters by asking for their reports."""

    def __init__(
        self,
        sidecars: StatsClient,
        wake: Callable[[ClusterKey], None],
        *,
        clock: Callable[[], float] = time.time,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Start without clusters.

        Args:
            wake: called with the key of a cluster whose report changed.
            clock: seconds since 1970; if it runs faster than the sidecars' clocks, reduce ``poll_seconds``.
        """
        self._sidecars, self._wake, self._clock = sidecars, wake, clock
        self._poll_seconds = poll_seconds
        self._watched: dict[ClusterKey, _Watched] = {}
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._counting = asyncio.Lock()  # slices of several clusters in a row would block the event loop
        self._queue = KeyedQueue(self._poll, num_workers=_NUM_WORKERS)

    async def close(self) -> None:
        """Stop polling."""
        await self._queue.close()

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        """See ``reconciler.Autoscaler``."""
        watched = self._watched.get(key)
        try:
            cluster = parse(observed[names.ENGINE].resource)
        except InvalidSpecError:  # the last report stays until the spec is valid again
            return watched.report if watched else None
        if cluster.spec.autoscaling.mode == OFF or cluster.spec.engine is None:
            self.forget(key)
            return None
        situation = _situation(cluster, observed)
        pods = {pod["metadata"]["uid"]: pod for pod in observed[names.ENGINE].pods}
        addresses = {uid: pods[uid]["status"]["podIP"] for uid in situation.pods}
        if watched is None:
            sizing = Sizing(saved(observed[names.AUTOSCALING]))
            watched = self._watched[key] = _Watched(key, situation, addresses, sizing, self._clock())
            self._queue.wake(key)
        watched.situation, watched.addresses = situation, addresses
        return watched.report

    def forget(self, key: ClusterKey) -> None:
        """See ``reconciler.Autoscaler``."""
        self._watched.pop(key, None)

    async def _poll(self, key: ClusterKey) -> float | None:
        watched = self._watched.get(key)
        if watched is None:
            return None
        addresses, slots = watched.addresses, asyncio.Semaphore(_MAX_REQUESTS_OF_A_CLUSTER)
        number = max(1, len(addresses))
        limits = min(_KEYS_OF_A_POD, _KEYS_OF_A_POLL // number), self._max_keys() // number
        deadline = asyncio.get_running_loop().time() + POLL_SECONDS
        answers = await asyncio.gather(
            *(self._ask(watched, uid, address, limits, slots, deadline) for uid, address in addresses.items())
        )
        now, situation = self._clock(), watched.situation
        pairs = zip(addresses, answers, strict=True)
        results = {uid: answer for uid, answer in pairs if uid in situation.pods}
        slices = watched.sizing.intake.take(now, situation.pods, situation.bounds, results, self._max_keys())
        is_counted = None
        while not is_counted:
            async with self._counting:  # clusters take turns after each slice
                is_counted = next(slices, True)
                await asyncio.sleep(0)
        watched.has_answered |= any(isinstance(result, TimedAnswer) for result in results.values())
        is_new = not watched.has_answered and 0 <= now - watched.since < DECIDE_SECONDS
        if not is_new and watched.sizing.is_due(now, situation):
            former, watched.report = watched.report, watched.sizing.decide(now, situation)
            if self._watched.get(key) is watched and _has_changed(former, watched.report):
                self._wake(key)
        # A random first interval spreads the polls of clusters that were registered together.
        share = 1.0 if watched.is_started else random.random()
        watched.is_started = True
        return self._poll_seconds * share

    def _max_keys(self) -> int:
        return min(_MAX_KEYS_OF_A_CLUSTER, _MAX_KEYS // max(1, len(self._watched)))

    async def _ask(
        self, watched: _Watched, uid: str, address: str, limits: tuple[int, int],
        slots: asyncio.Semaphore, deadline: float,
    ) -> TimedAnswer | NoAnswer:  # fmt: skip
        """Ask one sidecar until ``deadline``, a time of the event loop.

        Args:
            limits: keys to read from the answer, and from that of a sidecar that was silent for long. The
                latter only shows which keys are recent, so it needs no more keys than the curve tracks.
        """
        position = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline), slots, self._slots:
                cluster, question = watched.key.uid, watched.sizing.intake.question(uid)
                answer = await self._sidecars.samples(address, cluster, question)
                time, position = self._clock(), parsing.next_request(answer)
                known = watched.sizing.intake.pods.get(uid)
                is_known = known is not None and 0 <= time - known.answered <= STALE_SECONDS
                try:
                    if answer is not None:
                        samples = parsing.samples(answer, limits[not is_known])
                        answer = None  # frees its memory while the second request waits
                        if (figures := await self._sidecars.read(address, cluster)) is not None:
                            return TimedAnswer(time, samples, parsed_figures(figures))
                except parsing.InvalidAnswerError as error:
                    return NoAnswer(plain(str(error), 200), position)
        return NoAnswer("its sidecar does not answer")


def _has_changed(former: Report | None, report: Report) -> bool:
    """Return whether the reconciler has something to apply or to report."""
    if former is None or (former.memory, former.shards) != (report.memory, report.shards):
        return True
    return steady(former.status, report.status) is not former.status


def _situation(cluster: Cluster, observed: Mapping[str, Observed]) -> Situation:
    scaling, managed = cluster.spec.autoscaling, cluster.spec.tiers.managed
    is_auto, declared = scaling.mode == AUTO, cluster.memory.num_bytes
    # If each pod has a part of each row, only the first pod of an engine counts requests. Sizes are those of
    # its part, and all parts have the same size and price.
    num_parts = cluster.num_parts
    gpu_hour, memory_hour, shard_hour = scaling.prices.usd_per_hour
    settings = SizingSettings(
        declared,
        scaling.memory_bounds(declared),
        Prices(gpu_hour, memory_hour * num_parts, shard_hour * num_parts),
        num_parts,
        shards=managed.shards if managed else 0,
        shard_bounds=scaling.shard_bounds(managed.shards) if managed else (0, 0),
        shard_bytes=managed.shard_bytes // num_parts if managed else 0,
        is_memory_auto=is_auto and scaling.memory is not None,
        are_shards_auto=is_auto and scaling.remote is not None,
    )
    remote = observed[names.REMOTE]
    shards = listed_shards(remote) if managed else None
    filling, missing = (why_filling(remote), why_never_ready(remote)) if managed else ("", "")
    obstacle = Obstacle("Cooldown", filling) if filling else None
    engine = observed[names.ENGINE]
    pods = [pod for pod in engine.pods if has_running_sidecar(pod)]
    polled = [pod["metadata"] for pod in pods if num_parts == 1 or pod["metadata"]["name"].endswith("-0")]
    return Situation(
        settings,
        {metadata["uid"]: metadata["name"] for metadata in polled},
        _rollout(engine),
        tuple(_refusals(pods, engine.now)),
        tuple(_unplaced(engine, declared)),
        largest_in_place=min(map(largest_in_place, pods), default=0),
        num_shards=shards.current if shards else 0,
        shards_obstacle=Obstacle("Infeasible", missing) if missing else obstacle,
    )


def _refusals(pods: Iterable[Object], now: datetime) -> Iterator[UnavailableSize]:
    for pod in pods:
        if refusal := RefusedResize.of(pod, now):
            yield UnavailableSize(refusal.num_bytes, f"pod {pod['metadata']['name']}: {refusal.message}")


def _unplaced(engine: Observed, declared: int) -> Iterator[UnavailableSize]:
    for pod in engine.pods:
        if (size := initial_bytes(pod)) > declared and (reason := why_unplaced(pod, engine)):
            yield UnavailableSize(size, f"pod {pod['metadata']['name']}: {reason}")


def _rollout(engine: Observed) -> Obstacle | None:
    sets = [child for ref, child in engine.children.items() if ref.kind == "StatefulSet"]
    number = sum(each["spec"].get("replicas", 1) for each in sets)
    ready = sum(is_ready(pod) for pod in engine.pods)
    current = sum(not is_outdated(pod, sets[0]["spec"]["template"]) for pod in engine.pods) if sets else 0
    if number == len(engine.pods) == ready == current:
        return None
    return Obstacle("Cooldown", f"{min(ready, current)} of {number} pods are ready and match the spec")
