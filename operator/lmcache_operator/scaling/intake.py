"""What pods looked up, from what their sidecars say: merged, counted, and remembered. Pure.

Times are seconds of the operator's clock; those of a pod are moved by how far its own is off.
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

from lmcache.curves import HASHES, Lookup, Window, threshold_of
from lmcache_operator.autoscaling.decide import DAY_HALF_LIFE, FAST_HALF_LIFE
from lmcache_operator.autoscaling.traffic import Traffic
from lmcache_operator.scaling.answers import NOTHING, Counts, Figures, Samples

_CLOCK_SECONDS = 2.0
"""A pod's clock is taken to be another where it is off by so much more: answers take time."""
_KEPT = ("remote_bytes_per_second", "disk_bytes_per_second")
_KEYS_AT_ONCE = 1000
"""Fed in one go: about 7 ms."""


class Answer(NamedTuple):
    """What a pod said, and when it was here."""

    time: float
    samples: Samples
    figures: Figures


class NoAnswer(NamedTuple):
    """Why nothing of a pod can be used, and from where on to ask the next time."""

    problem: str
    next: int | None = None


@dataclass
class Pod:
    """What is known of one."""

    answered: float = -math.inf
    offset: float = 0.0
    """Of our clock from the pod's."""
    started: float | None = None
    """Of its ring; None: what comes next was asked for before it was watched."""
    next: int = 0
    lost: float = -math.inf
    """When samples of it were lost last."""
    figures: Figures = NOTHING
    problem: str = "it was not asked yet"


class Intake:
    """Takes what the sidecars of one cluster say; a ``take`` is ended before anything else is asked of it."""

    def __init__(self, saved_traffic: Mapping[str, Any]) -> None:
        """``saved_traffic``: what ``Traffic.state`` returned, if anything."""
        self.pods: dict[str, Pod] = {}
        """By uid."""
        self.traffic: Traffic | None = None
        """None: nothing was looked up."""
        self.is_new = False
        """Whether ``traffic`` knows nothing of what was before; to be set back by who has seen it."""
        self.engine = Window(DAY_HALF_LIFE, 1.0, 2.0)
        """Tokens, and of them those that engines hit in their own caches."""
        self.lower = Window(FAST_HALF_LIFE, 1.0, 2.0)
        """Tokens, and of them those that a lower tier had: beside the present size of memory."""
        self.moved = Window(FAST_HALF_LIFE, 1.0, 2.0)
        """Bytes to and from the remote tier."""
        self.prefill = Window(DAY_HALF_LIFE, 1.0, 2.0)
        """Tokens, and the seconds that pods would have taken to compute them."""
        self.num_samples = self.row_bytes = self.chunk_tokens = 0
        self._counted = -math.inf
        self._saved_traffic = saved_traffic

    def question(self, uid: str) -> dict[str, int]:
        """The parameters of ``/samples`` for a pod: no more keys than could be counted."""
        since = self.pods[uid].next if uid in self.pods else 0
        below = threshold_of(self.traffic.curve.wanted_rate) if self.traffic else HASHES
        return {"since": since, "below": below}

    def take(
        self, now: float, pods: Collection[str], bounds: tuple[float, float],
        said: Mapping[str, Answer | NoAnswer], max_keys: int,
    ) -> Iterator[None]:  # fmt: skip
        """Count what pods say, a slice of it at each step; ``max_keys`` bounds what is remembered of keys.

        What a pod says the first time tells what it was asked for last, and is not counted: of how many
        lookups these samples are is not known.
        """
        for uid in self.pods.keys() - set(pods):
            del self.pods[uid]
            if self.traffic:
                self.traffic.curve.forget(uid)
        answers = {uid: one for uid, one in said.items() if isinstance(one, Answer)}
        for uid, one in said.items():
            pod = self.pods.setdefault(uid, Pod())
            if isinstance(one, NoAnswer):
                pod.problem = one.problem
                if one.next is not None:
                    pod.next, pod.started = one.next, None
        known = {uid: self.pods[uid].started == one.samples.started for uid, one in answers.items()}
        grown = [(self._note(now, self.pods[uid], one), one.samples) for uid, one in answers.items()]
        self._enter_namespace(bounds, [samples for _, samples in grown], max_keys)
        if self.traffic and (grown or not self.pods):  # hours without pods are hours, too
            seconds, self._counted = now - self._counted, now
            own = [counts for counts, samples in grown if samples.namespace == self.traffic.namespace]
            self._count(now, seconds, Counts(*(sum(counts) for counts in zip(Counts(), *own, strict=True))))
        batch: list[Lookup] = []
        num_keys = 0
        streams = (self._lookups(uid, one, known[uid]) for uid, one in answers.items())
        for _, lookup in heapq.merge(*streams, key=itemgetter(0)):
            batch.append(lookup)
            num_keys += len(lookup.keys)
            if num_keys >= _KEYS_AT_ONCE:
                self._feed(batch)
                batch, num_keys = [], 0
                yield
        self._feed(batch)

    def _note(self, now: float, pod: Pod, one: Answer) -> Counts:
        """Note what a pod says of itself, and return by how much its counts have grown."""
        found, former = one.samples, pod.figures.counts
        is_known = found.started == pod.started
        if pod.next and not is_known and pod.started is not None:
            pod.started, pod.next = None, 0  # another sidecar: its requests are numbered anew
        else:
            pod.started, pod.next = found.started, found.next
        if found.num_lost and is_known:
            pod.lost = now
        if abs((offset := one.time - found.now) - pod.offset) > _CLOCK_SECONDS:
            pod.offset = offset
        # How fast it loads is not known while it loads nothing.
        rates = {name: getattr(one.figures, name) or getattr(pod.figures, name) for name in _KEPT}
        pod.answered, pod.figures, pod.problem = now, one.figures._replace(**rates), ""
        grown = [new - old for new, old in zip(one.figures.counts, former, strict=True)]
        return Counts(*grown) if is_known and min(grown) >= 0 else Counts()

    def _lookups(self, uid: str, one: Answer, is_counted: bool) -> Iterator[tuple[float, Lookup]]:
        samples, pod = one.samples, self.pods[uid]
        if self.traffic and samples.namespace == self.traffic.namespace and pod.started is not None:
            for time, keys in samples.requests():
                at = min(time + pod.offset, one.time)
                yield at, Lookup(at if is_counted else -math.inf, keys, samples.row_bytes, uid)

    def _feed(self, batch: Sequence[Lookup]) -> None:
        if self.traffic:
            self.num_samples += sum(len(lookup.keys) for lookup in batch if lookup.time > -math.inf)
            self.traffic.curve.feed(batch)

    def _enter_namespace(
        self, bounds: tuple[float, float], samples: Sequence[Samples], max_keys: int
    ) -> None:
        """Count the keys of the namespace of most pods, which has to be that of more than half of them."""
        votes = Counter(found.namespace for found in samples if found.namespace)
        if not votes:
            return
        (name, most), present = votes.most_common(1)[0], self.traffic
        is_other = present is not None and present.namespace != name and 2 * most > votes.total()
        if present is None or is_other or present.bounds != bounds:
            if is_other:
                self.prefill.restart(-math.inf)
            self.traffic = present = Traffic(name, *bounds, max_keys=max_keys, is_shared=True)
            try:
                present.restore(self._saved_traffic)
            except ValueError:  # there is none, or it is of other keys or bounds: all begins anew
                self.is_new = True
            self._saved_traffic = {}
        own = [found for found in samples if found.namespace == present.namespace]
        if own:
            self.row_bytes, self.chunk_tokens = own[0].row_bytes, own[0].chunk_tokens
            present.curve.limit(min(found.rate for found in own), max_keys)

    def _count(self, now: float, seconds: float, grown: Counts) -> None:
        """Of all pods together, since they were counted last."""
        if self.traffic is None or not 0 < seconds < math.inf:
            return  # nothing to be counted, the first time, or the clock was set
        tokens, near = max(1, self.chunk_tokens), grown.engine + grown.memory
        missed = max(0, grown.looked_up - near) / tokens
        accesses, hits, far = (count / tokens for count in (grown.looked_up, near, grown.remote))
        filled, number = missed * self.row_bytes, len(self.pods)
        self.traffic.count(now, seconds, accesses, hits, far, filled, num_pods=number)
        self.engine.count(now, grown.looked_up, grown.engine, seconds)
        rates = [rate for pod in self.pods.values() if (rate := pod.figures.prefill_tokens_per_second)]
        if rates:
            self.prefill.count(now, grown.looked_up, grown.looked_up / median(rates), seconds)
        self.lower.count(now, grown.looked_up, grown.disk + grown.remote, seconds)
        stored = grown.written * grown.stored / max(1, grown.stored + grown.touched)
        self.moved.count(now, (stored + grown.promoted) * self.row_bytes, 0.0, seconds)
