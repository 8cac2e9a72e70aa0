"""Lookups of all pods of a cluster: answers of sidecars merged over time, and counted. Pure.

Times are seconds of the operator's clock. The times of a pod are corrected by the offset of its clock.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from lmcache_operator.autoscaling.intake.answers import NOTHING, Counts, Figures
from lmcache_operator.policy.decide import DAY_HALF_LIFE, FAST_HALF_LIFE
from lmcache_operator.policy.traffic import Traffic
from lmcache_store.curves import HASHES, Lookup, Window, threshold_of
from lmcache_store.curves.answers import Samples

_CLOCK_SECONDS = 2.0
"""Change of a pod's clock offset that is believed. Smaller ones are the delay of answers."""
_LOAD_RATES = ("remote_bytes_per_second", "disk_bytes_per_second")
_KEYS_OF_A_SLICE = 1000
"""Keys fed to the curve without a pause: about 7 ms."""


class TimedAnswer(NamedTuple):
    """Answer of a pod, and the time at which it arrived."""

    time: float
    samples: Samples
    figures: Figures


class NoAnswer(NamedTuple):
    """Reason why a pod has no usable answer, and the position for the next request."""

    problem: str
    next: int | None = None


@dataclass
class PolledPod:
    """State of one polled pod."""

    answered: float = -math.inf
    offset: float = 0.0
    """Seconds to add to the pod's times."""
    started: float | None = None
    """Start of its ring; None: the next answer has samples of lookups before the polling."""
    next: int = 0
    lost: float = -math.inf
    """Time of the latest loss of samples."""
    figures: Figures = NOTHING
    problem: str = "not polled yet"


class Intake:
    """Merges and counts the answers of one cluster's sidecars.

    The caller must exhaust the iterator of ``take`` before it uses anything else.
    """

    def __init__(self, saved_traffic: Mapping[str, Any]) -> None:
        """Start with no lookups. ``saved_traffic``: result of ``Traffic.state``, or empty."""
        self.pods: dict[str, PolledPod] = {}
        """Polled pods by uid."""
        self.traffic: Traffic | None = None
        """Counted lookups; None before the first one."""
        self.is_new = False
        """Whether ``traffic`` started empty. The caller resets it when it has noted that."""
        self.engine = Window(DAY_HALF_LIFE, 1.0, 2.0)
        """Looked-up tokens, and those that engines hit in their own caches."""
        self.lower = Window(FAST_HALF_LIFE, 1.0, 2.0)
        """Looked-up tokens, and those that a lower tier hit, with the present size of memory."""
        self.moved = Window(FAST_HALF_LIFE, 1.0, 2.0)
        """Bytes to and from the remote tier."""
        self.prefill = Window(DAY_HALF_LIFE, 1.0, 2.0)
        """Looked-up tokens, and the seconds that pods need to compute them."""
        self.num_samples = self.row_bytes = self.chunk_tokens = 0
        self._counted = -math.inf
        self._saved_traffic = saved_traffic

    def question(self, uid: str) -> dict[str, int]:
        """Return the query parameters of ``/samples`` for a pod: only keys that the curve tracks."""
        since = self.pods[uid].next if uid in self.pods else 0
        below = threshold_of(self.traffic.curve.wanted_rate) if self.traffic else HASHES
        return {"since": since, "below": below}

    def take(
        self, now: float, pods: Collection[str], bounds: tuple[float, float],
        results: Mapping[str, TimedAnswer | NoAnswer], max_keys: int,
    ) -> Iterator[None]:  # fmt: skip
        """Count the answers of pods, one slice at each step. ``max_keys`` bounds the tracked keys.

        The first samples of a pod show which keys are recent, but are not counted: the number of lookups that
        they stand for is unknown.
        """
        for uid in self.pods.keys() - set(pods):
            del self.pods[uid]
            if self.traffic:
                self.traffic.curve.forget(uid)
        answers = {uid: result for uid, result in results.items() if isinstance(result, TimedAnswer)}
        for uid, result in results.items():
            pod = self.pods.setdefault(uid, PolledPod())
            if isinstance(result, NoAnswer):
                pod.problem = result.problem
                if result.next is not None:
                    pod.next, pod.started = result.next, None
        is_known = {uid: self.pods[uid].started == answer.samples.started for uid, answer in answers.items()}
        grown = [(self._note(now, self.pods[uid], answer), answer.samples) for uid, answer in answers.items()]
        self._enter_namespace(bounds, [samples for _, samples in grown], max_keys)
        if self.traffic and (grown or not self.pods):  # time without pods counts, too
            seconds, self._counted = now - self._counted, now
            counts = [counts for counts, samples in grown if samples.namespace == self.traffic.namespace]
            self._count(now, seconds, Counts(*map(sum, zip(Counts(), *counts, strict=True))))
        batch: list[Lookup] = []
        num_keys = 0
        streams = (self._lookups(uid, answer, is_known[uid]) for uid, answer in answers.items())
        for _, lookup in heapq.merge(*streams, key=itemgetter(0)):
            batch.append(lookup)
            num_keys += len(lookup.keys)
            if num_keys >= _KEYS_OF_A_SLICE:
                self._feed(batch)
                batch, num_keys = [], 0
                yield
        self._feed(batch)

    def _note(self, now: float, pod: PolledPod, answer: TimedAnswer) -> Counts:
        """Note the figures of a pod, and return by how much its counts have grown."""
        samples, former = answer.samples, pod.figures.counts
        is_known = samples.started == pod.started
        if pod.next and not is_known and pod.started is not None:
            pod.started, pod.next = None, 0  # another sidecar: it numbers its samples from 0
        else:
            pod.started, pod.next = samples.started, samples.next
        if samples.num_lost and is_known:
            pod.lost = now
        if abs((offset := answer.time - samples.now) - pod.offset) > _CLOCK_SECONDS:
            pod.offset = offset
        # A sidecar that loads nothing reports no speed, and the last known one stays.
        rates = {name: getattr(answer.figures, name) or getattr(pod.figures, name) for name in _LOAD_RATES}
        pod.answered, pod.figures, pod.problem = now, answer.figures._replace(**rates), ""
        grown = [new - old for new, old in zip(answer.figures.counts, former, strict=True)]
        return Counts(*grown) if is_known and min(grown) >= 0 else Counts()

    def _lookups(self, uid: str, answer: TimedAnswer, is_counted: bool) -> Iterator[tuple[float, Lookup]]:
        samples, pod = answer.samples, self.pods[uid]
        if self.traffic and samples.namespace == self.traffic.namespace and pod.started is not None:
            for time, keys in samples.requests():
                moment = min(time + pod.offset, answer.time)
                yield moment, Lookup(moment if is_counted else -math.inf, keys, samples.row_bytes, uid)

    def _feed(self, batch: Sequence[Lookup]) -> None:
        if self.traffic:
            self.num_samples += sum(len(lookup.keys) for lookup in batch if lookup.time > -math.inf)
            self.traffic.curve.feed(batch)

    def _enter_namespace(
        self, bounds: tuple[float, float], samples: Sequence[Samples], max_keys: int
    ) -> None:
        """Count the keys of the namespace that more than half of the pods use."""
        votes = Counter(answer.namespace for answer in samples if answer.namespace)
        if not votes:
            return
        (name, num_votes), present = votes.most_common(1)[0], self.traffic
        is_other = present is not None and present.namespace != name and 2 * num_votes > votes.total()
        if present is None or is_other or present.bounds != bounds:
            if is_other:
                self.prefill.restart(-math.inf)
            self.traffic = present = Traffic(name, *bounds, max_keys=max_keys)
            try:
                present.restore(self._saved_traffic)
            except ValueError:  # none, or of another namespace or other bounds: counting starts again
                self.is_new = True
            self._saved_traffic = {}
        counted = [answer for answer in samples if answer.namespace == present.namespace]
        if counted:
            self.row_bytes, self.chunk_tokens = counted[0].row_bytes, counted[0].chunk_tokens
            present.curve.limit(min(answer.rate for answer in counted), max_keys)

    def _count(self, now: float, seconds: float, grown: Counts) -> None:
        """Count the growth of all pods' counts since the last call."""
        if self.traffic is None or not 0 < seconds < math.inf:
            return  # no traffic, the first call, or a clock that was set
        tokens, near = max(1, self.chunk_tokens), grown.engine + grown.memory
        missed = max(0, grown.looked_up - near) / tokens
        shared = grown.peers + grown.remote  # peers hold what the remote tier could hold
        accesses, hits, far = (count / tokens for count in (grown.looked_up, near, shared))
        filled, number = missed * self.row_bytes, len(self.pods)
        self.traffic.count(now, seconds, accesses, hits, far, filled, num_pods=number)
        self.engine.count(now, grown.looked_up, grown.engine, seconds)
        rates = [rate for pod in self.pods.values() if (rate := pod.figures.prefill_tokens_per_second)]
        if rates:
            self.prefill.count(now, grown.looked_up, grown.looked_up / median(rates), seconds)
        self.lower.count(now, grown.looked_up, grown.disk + shared, seconds)
        stored = grown.written * grown.stored / max(1, grown.stored + grown.touched)
        self.moved.count(now, (stored + grown.promoted) * self.row_bytes, 0.0, seconds)
