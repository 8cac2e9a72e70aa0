"""Miss-ratio curves of caches that are asked for whole requests, from samples."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress

from lmcache.curves.samples import HASHES, Lookup, threshold_of
from lmcache.curves.stack import UNTRACKED, RecencyStack
from lmcache.curves.window import KNOWN, NUM_GROUPS, Estimate, Window

_NUM_HEAVY = 128  # candidates for hot keys: those of more than 1/128 of the accesses are found
_HOT_AFTER = 64  # accesses
_MAX_HOT = 64
_AT_ONCE = 5.0  # seconds: of a half-life of an hour, a thousandth
_MORE = 2  # times as many keys, or nothing is changed
_LEARNED_AFTER = 3600.0  # seconds: what comes back later is hardly worth its place in a cache


class _Batch:
    """Accesses of about the same time, which are counted together."""

    def __init__(self, time: float = math.nan, num_bytes: int = 0) -> None:
        self.time, self.num_bytes = time, num_bytes
        self.groups: list[int] = []
        self.near: list[int] = []
        """Distances in the streams' own caches."""
        self.far: list[int] = []
        """Distances in the shared one, if there is one."""


class MissRatioCurve:
    """The curve of caches of one size each, every stream of lookups its own; not thread-safe.

    ``rate`` is that of the samplers; ``max_keys`` bounds what is tracked (about 200 bytes each, once for its
    own cache and once for the shared one). There is a window per half-life, in seconds. Keys that a cache of
    ``largest_bytes`` would have evicted are forgotten. A threshold that came down rises again when samplers
    offer more, and there is room: keys above it are tracked for an hour before they count.

    With ``shared``, what a cache that all streams share would hit *behind* their own is counted as well.
    """

    def __init__(
        self,
        max_keys: int = 16_000,
        *,
        rate: float = 1.0,
        half_lives: Sequence[float] = (math.inf,),
        smallest_bytes: float = 1.0,
        largest_bytes: float = 2.0**56,
        shared: bool = False,
    ) -> None:
        """Raise ValueError for values that make no sense."""
        if max_keys < 1 or not half_lives:
            raise ValueError("max_keys must be positive, and a half-life given")
        self._max_keys, self._largest = max_keys, largest_bytes
        self._threshold = self._tracked = threshold_of(rate)
        self._tracked_since: float | None = None  # those from the threshold on
        self._stacks: dict[Hashable, RecencyStack] = {}
        self._shared = RecencyStack() if shared else None
        self.windows = [Window(seconds, smallest_bytes, largest_bytes) for seconds in half_lives]
        """Of the streams' own caches, in the order of ``half_lives``."""
        self.shared_windows = [
            Window(seconds, smallest_bytes, largest_bytes) for seconds in half_lives if shared
        ]
        """Of the shared cache: what is hit there, and not nearer."""
        self.pooled_windows = [Window(half_lives[0], smallest_bytes, largest_bytes)] if shared else []
        """Of the shared cache if there were no others, with the first half-life only."""
        self.own_bytes = 0.0
        """Size of the streams' own caches: what they hit, the shared one has no credit for."""
        self.new_bytes = 0.0
        """Estimate of all objects that were seen for the first time, all streams together."""
        self.counts_from = -math.inf
        """What is older only tells what was accessed last; as after ``Window.restore``."""
        self.num_keys = 0
        """Tracked now, once for each cache."""
        self._hot: set[int] = set()
        self._heavy: dict[int, int] = {}  # candidates, and how often they were seen at least
        self._num_fed = 0
        self._tell_windows(1.0)

    @property
    def all_windows(self) -> list[Window]:
        """Whatever they count."""
        return [*self.windows, *self.shared_windows, *self.pooled_windows]

    @property
    def rate(self) -> float:
        """Share of all keys that is tracked now."""
        return self._threshold / HASHES

    @property
    def wanted_rate(self) -> float:
        """What samplers should be asked for: as many keys as half of the room is enough for."""
        room = self._max_keys / (2 * self.num_keys + 1)
        return max(self._tracked / HASHES, min(1.0, self.rate * room) if room >= _MORE else 0.0)

    def count_accesses(self, num_accesses: int, time: float = 0.0) -> None:
        """Tell all windows how many accesses there were, sampled or not, about ``time``."""
        for window in self.all_windows:
            window.count(time, num_accesses)

    def hit_ratio(self, size_bytes: float) -> Estimate:
        """Estimate the hit ratio (per access) of caches of ``size_bytes`` each, by the first window."""
        return self.windows[0].hit_ratio(size_bytes)

    def feed(self, lookups: Iterable[Lookup]) -> None:
        """Add lookups in the order of their time."""
        batch = _Batch()
        for time, keys, num_bytes, stream in lookups:
            if self._threshold < HASHES:
                self._note_heavy(keys)
            if self._tracked > self._threshold and self._is_learned(time):
                self._count(batch)
                batch = _Batch()
                self._raise_threshold()
            threshold, hot = self._tracked, self._hot
            kept = [key for key in keys if key < threshold or key in hot]
            if not kept:
                continue
            own = self._stacks.get(stream)
            if own is None:
                own = self._stacks[stream] = RecencyStack()
            own_distances = self._look_up(own, kept, num_bytes)
            shared = self._look_up(self._shared, kept, num_bytes) if self._shared is not None else ()
            if self._tracked > self._threshold:
                counts = [key < self._threshold or key in hot for key in kept]
                kept, own_distances, shared = (
                    list(compress(values, counts)) for values in (kept, own_distances, shared)
                )
            if time > self.counts_from:
                if num_bytes != batch.num_bytes or not -_AT_ONCE < time - batch.time < _AT_ONCE:
                    self._count(batch)
                    batch = _Batch(time, num_bytes)
                batch.groups += [KNOWN if key in hot else key % NUM_GROUPS for key in kept]
                batch.near += own_distances
                batch.far += shared
            if self.num_keys > self._max_keys:
                self._count(batch)
                batch = _Batch()
                self._lower_threshold()
        self._count(batch)

    def limit(self, rate: float, max_keys: int) -> None:
        """Count no more keys than samplers with this ``rate`` keep, and track no more than ``max_keys``; more
        than now if both allow it."""
        self._max_keys = max_keys
        offered = min(threshold_of(rate), threshold_of(self.wanted_rate))
        if offered < self._tracked:
            self._lower_threshold(min(offered, self._threshold))
        elif self.num_keys > max_keys:
            self._lower_threshold()
        elif self._tracked == self._threshold and offered >= _MORE * self._threshold:
            self._tracked, self._tracked_since = offered, None

    def forget(self, stream: Hashable) -> None:
        """A cache is gone: what it held is new to its successor."""
        self.num_keys -= len(self._stacks.pop(stream, ()))

    def _look_up(self, stack: RecencyStack, keys: Sequence[int], num_bytes: int) -> list[int]:
        """The distances of all keys, before any of them is touched."""
        weightless = self._hot
        if self._tracked > self._threshold:  # of some it is only learned in which order they come
            weightless = weightless.union(key for key in keys if key >= self._threshold)
        distances = stack.access(keys, num_bytes, weightless)
        self.num_keys += distances.count(UNTRACKED)
        if stack.num_bytes > self._most_bytes:
            self.num_keys -= stack.forget_beyond(self._most_bytes)
        return distances

    def _count(self, batch: _Batch) -> None:
        """Count accesses, by their distances in their own cache and in the shared one."""
        time, num_bytes, groups, near, far = (
            batch.time, batch.num_bytes, batch.groups, batch.near, batch.far
        )  # fmt: skip
        if not groups:
            return
        if num_bytes != self.windows[0].row_bytes:
            self._tell_windows(num_bytes)
        weight = HASHES / self._threshold
        self.new_bytes += near.count(UNTRACKED) * weight * num_bytes
        steps = self.windows[0].steps(near, weight, num_bytes)
        for window in self.windows:
            window.add(time, groups, steps, weight)
        if far:
            held = self.own_bytes / weight
            beyond = [UNTRACKED if 0 <= own <= held else other for own, other in zip(near, far, strict=True)]
            steps = self.windows[0].steps(beyond, weight, num_bytes)
            for window in self.shared_windows:
                window.add(time, groups, steps, weight)
            for window in self.pooled_windows:
                window.add(time, groups, window.steps(far, weight, num_bytes), weight)

    def _note_heavy(self, keys: Sequence[int]) -> None:
        """Misra-Gries: no key with more than 1/_NUM_HEAVY of all accesses goes unnoticed."""
        self._num_fed += len(keys)
        heavy = self._heavy
        for key in keys:
            num_seen = heavy[key] = heavy.get(key, 0) + 1
            if (
                not num_seen % _HOT_AFTER
                and num_seen * _NUM_HEAVY > self._num_fed
                and len(self._hot) < _MAX_HOT
            ):
                self._hot.add(key)
        while len(heavy) > _NUM_HEAVY:
            heavy = self._heavy = {key: num - 1 for key, num in heavy.items() if num > 1}

    def _lower_threshold(self, threshold: int | None = None) -> None:
        """Sample fewer keys, and forget the others."""
        stacks = self._all_stacks()
        if threshold or self._tracked == self._threshold:  # keys that are only learned are given up first
            self._threshold = threshold or self._threshold - max(1, self._threshold >> 3)
        while True:
            for stack in stacks:
                for key in [key for key in stack if key >= self._threshold and key not in self._hot]:
                    stack.forget(key)
            self.num_keys = sum(map(len, stacks))
            if self.num_keys <= self._max_keys or self._threshold <= 1:
                break
            self._threshold -= max(1, self._threshold >> 3)
        self._tracked = self._threshold
        self._tell_windows(self.windows[0].row_bytes)

    def _is_learned(self, time: float) -> bool:
        """Whether keys from the threshold on were tracked for long enough."""
        if self._tracked_since is None and time > -math.inf:
            self._tracked_since = time
        return self._tracked_since is not None and time - self._tracked_since >= _LEARNED_AFTER

    def _raise_threshold(self) -> None:
        """Count all keys that are tracked."""
        self._threshold = self._tracked
        if self._threshold == HASHES:
            self._hot.clear()
        row_bytes = self.windows[0].row_bytes
        for stack in self._all_stacks():
            stack.weigh(int(row_bytes), self._hot)
        self._tell_windows(row_bytes)

    def _all_stacks(self) -> list[RecencyStack]:
        return [*self._stacks.values(), *([] if self._shared is None else [self._shared])]

    def _tell_windows(self, row_bytes: float) -> None:
        self._most_bytes = self._largest * self.rate
        for window in self.all_windows:
            window.rate, window.row_bytes = self.rate, row_bytes
