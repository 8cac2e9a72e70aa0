"""Asks sidecars what was looked up, and wakes clusters of which there is news."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from lmcache_operator.api.autoscaling import AUTO, OFF
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.autoscaling.decide import DECIDE_SECONDS
from lmcache_operator.autoscaling.report import Report, steady
from lmcache_operator.autoscaling.state import Obstacle
from lmcache_operator.autoscaling.tier import Prices
from lmcache_operator.components.autoscaling import saved
from lmcache_operator.components.base import Observed
from lmcache_operator.components.pods import is_outdated, is_ready, plain, why_unplaced
from lmcache_operator.components.remote.remote import listed_shards, why_filling, why_not_coming
from lmcache_operator.components.resize import Refusal, made_with, reach
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.probe import has_running_sidecar
from lmcache_operator.scaling import answers
from lmcache_operator.scaling.intake import Answer, NoAnswer
from lmcache_operator.scaling.sizing import POLL_SECONDS, STALE_SECONDS, Refused, Settings, Situation, Sizing
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import ClusterKey

_NUM_WORKERS = 16
"""Clusters polled at the same time."""
_MAX_AT_ONCE, _MAX_OF_ONE = 32, 8
"""Sidecars asked at the same time, and those of one cluster: a thousand that are quick take seconds, what is
read is bounded, and those that hang hold up their own cluster."""
_MAX_KEYS, _MOST_KEYS = 800_000, 64_000
"""Tracked of all clusters together, and of one; about 200 bytes each."""
_KEYS_OF_A_POD, _KEYS_OF_A_POLL = 32_768, 1 << 19
"""Counted of one answer, and of all of a cluster. A sidecar says a quarter of that in a minute, since its
ring of 65,536 lasts for eight, and more in a burst; one that looks up 20,000 tokens a second says as much
in seven minutes. They take 8 to 24 bytes each until all pods of a cluster have answered."""


class Sidecars(Protocol):
    """How to ask one, by its address; None: it does not answer."""

    async def samples(self, address: str, question: Mapping[str, int]) -> Any:
        """Its ``/samples``."""

    async def read(self, address: str) -> Any:
        """Its ``/stats``."""


@dataclass
class _Watched:
    """A cluster that is polled."""

    key: ClusterKey
    situation: Situation
    addresses: Mapping[str, str]
    """Of its sidecars, by the uids of their pods."""
    sizing: Sizing
    since: float
    """When it was seen first; what nobody has answered yet is no news for a while."""
    has_answered: bool = False
    report: Report | None = None
    is_started: bool = field(default=False)


class Poller:
    """The autoscaler of all clusters: the reconciler tells it of them, and asks for its reports."""

    def __init__(
        self,
        sidecars: Sidecars,
        wake: Callable[[ClusterKey], None],
        *,
        clock: Callable[[], float] = time.time,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """``clock``: seconds since 1970. With one that runs faster than the sidecars', poll more often."""
        self._sidecars, self._wake, self._clock = sidecars, wake, clock
        self._poll_seconds = poll_seconds
        self._watched: dict[str, _Watched] = {}
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._counting = asyncio.Lock()  # slices of several clusters without a pause would hold up all
        self._queue = KeyedQueue(self._poll, num_workers=_NUM_WORKERS)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._queue.close()

    def report(self, key: ClusterKey, observed: Mapping[str, Observed]) -> Report | None:
        """See ``reconciler.Autoscaler``."""
        watched = self._watched.get(key.uid)
        try:
            cluster = parse(observed[names.ENGINE].resource)
        except InvalidSpecError:  # as long as it is, all stays as it was
            return watched.report if watched else None
        if cluster.spec.autoscaling.mode == OFF or cluster.spec.engine is None:
            self.forget(key)
            return None
        situation = _situation(cluster, observed)
        pods = [pod for pod in observed[names.ENGINE].pods if has_running_sidecar(pod)]
        addresses = {pod["metadata"]["uid"]: pod["status"]["podIP"] for pod in pods}
        if watched is None:
            sizing = Sizing(saved(observed[names.AUTOSCALING]))
            watched = self._watched[key.uid] = _Watched(key, situation, addresses, sizing, self._clock())
            self._queue.wake(key)
        watched.situation, watched.addresses = situation, addresses
        return watched.report

    def forget(self, key: ClusterKey) -> None:
        """See ``reconciler.Autoscaler``."""
        self._watched.pop(key.uid, None)

    async def _poll(self, key: ClusterKey) -> float | None:
        watched = self._watched.get(key.uid)
        if watched is None:
            return None
        asked, slots = watched.addresses, asyncio.Semaphore(_MAX_OF_ONE)
        number = max(1, len(asked))
        most = min(_KEYS_OF_A_POD, _KEYS_OF_A_POLL // number), self._max_keys() // number
        until = asyncio.get_running_loop().time() + POLL_SECONDS
        found = await asyncio.gather(
            *(self._ask(watched, uid, address, most, slots, until) for uid, address in asked.items())
        )
        now, situation = self._clock(), watched.situation
        said = {uid: one for uid, one in zip(asked, found, strict=True) if uid in situation.pods}
        slices = watched.sizing.intake.take(now, situation.pods, situation.bounds, said, self._max_keys())
        is_counted = None
        while not is_counted:
            async with self._counting:  # of which clusters have their turns
                is_counted = next(slices, True)
                await asyncio.sleep(0)
        watched.has_answered |= any(isinstance(one, Answer) for one in said.values())
        is_new = not watched.has_answered and 0 <= now - watched.since < DECIDE_SECONDS
        if not is_new and watched.sizing.is_due(now, situation):
            former, watched.report = watched.report, watched.sizing.decide(now, situation)
            if self._watched.get(key.uid) is watched and _is_news(former, watched.report):
                self._wake(key)
        # Clusters that were first seen together are not polled together.
        share = 1.0 if watched.is_started else random.random()
        watched.is_started = True
        return self._poll_seconds * share

    def _max_keys(self) -> int:
        return min(_MOST_KEYS, _MAX_KEYS // max(1, len(self._watched)))

    async def _ask(
        self, watched: _Watched, uid: str, address: str, most: tuple[int, int],
        slots: asyncio.Semaphore, until: float,
    ) -> Answer | NoAnswer:  # fmt: skip
        """Up to a time of the loop. ``most``: samples that are read, and those of one that was not heard for
        long: they tell only what it holds, and no more of that is remembered."""
        following = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until), slots, self._slots:
                found = await self._sidecars.samples(address, watched.sizing.intake.question(uid))
                time, following = self._clock(), answers.next_request(found)
                known = watched.sizing.intake.pods.get(uid)
                is_known = known is not None and 0 <= time - known.answered <= STALE_SECONDS
                try:
                    if found is not None:
                        samples = answers.samples(found, most[not is_known])
                        found = None  # what makes no sense may be large, and the other answer late
                        if (figures := await self._sidecars.read(address)) is not None:
                            return Answer(time, samples, answers.figures(figures))
                except answers.RefusedAnswerError as error:
                    return NoAnswer(plain(str(error), 200), following)
        return NoAnswer("it does not answer")


def _is_news(former: Report | None, report: Report) -> bool:
    """Whether there is anything to be done, or told."""
    if former is None or (former.memory, former.shards) != (report.memory, report.shards):
        return True
    return steady(former.status, report.status) is not former.status


def _situation(cluster: Cluster, observed: Mapping[str, Observed]) -> Situation:
    scaling, managed = cluster.spec.autoscaling, cluster.spec.tiers.managed
    is_auto, declared = scaling.mode == AUTO, cluster.memory.num_bytes
    settings = Settings(
        declared,
        scaling.memory_bounds(declared),
        Prices(*scaling.prices.usd_per_hour),
        shards=managed.shards if managed else 0,
        shard_bounds=scaling.shard_bounds(managed.shards) if managed else (0, 0),
        shard_bytes=managed.shard_bytes if managed else 0,
        is_memory_auto=is_auto and scaling.memory is not None,
        are_shards_auto=is_auto and scaling.remote is not None,
    )
    remote = observed[names.REMOTE]
    shards = listed_shards(remote) if managed else None
    why, late = (why_filling(remote), why_not_coming(remote)) if managed else ("", "")
    obstacle = Obstacle("Cooldown", why) if why else None
    engine = observed[names.ENGINE]
    pods = [pod for pod in engine.pods if has_running_sidecar(pod)]
    return Situation(
        settings,
        {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods},
        _rollout(engine),
        tuple(_refusals(pods, engine.now)),
        tuple(_unplaced(engine, declared)),
        reach=min(map(reach, pods), default=0),
        num_shards=shards.current if shards else 0,
        shards_obstacle=Obstacle("Infeasible", late) if late else obstacle,
    )


def _refusals(pods: Iterable[Object], now: datetime) -> Iterator[Refused]:
    for pod in pods:
        if refusal := Refusal.of(pod, now):
            yield Refused(refusal.num_bytes, f"pod {pod['metadata']['name']}: {refusal.message}")


def _unplaced(engine: Observed, declared: int) -> Iterator[Refused]:
    for pod in engine.pods:
        if (size := made_with(pod)) > declared and (why := why_unplaced(pod, engine)):
            yield Refused(size, f"pod {pod['metadata']['name']}: {why}")


def _rollout(engine: Observed) -> Obstacle | None:
    sets = [child for ref, child in engine.children.items() if ref.kind == "StatefulSet"]
    number = sets[0]["spec"].get("replicas", 1) if sets else 0
    ready = sum(is_ready(pod) for pod in engine.pods)
    as_declared = sum(not is_outdated(pod, sets[0]["spec"]["template"]) for pod in engine.pods) if sets else 0
    if number == len(engine.pods) == ready == as_declared:
        return None
    return Obstacle("Cooldown", f"{min(ready, as_declared)} of {number} pods are ready and as declared")
