"""Miss-ratio curves of caches that look up whole requests, computed from samples."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress

from lmcache_store.curves.samples import HASHES, Lookup, threshold_of
from lmcache_store.curves.stack import UNTRACKED, RecencyStack
from lmcache_store.curves.window import KNOWN, NUM_GROUPS, Estimate, Window

_NUM_CANDIDATES = 128  # for hot keys: every key with more than 1/128 of the accesses is among them
_HOT_AFTER = 64  # accesses
_MAX_HOT = 64
_BATCH_SECONDS = 5.0  # accesses within them count as simultaneous; about 1/1000 of a half-life of an hour
_MIN_GROWTH = 2  # the threshold rises only if this many times as many keys are then tracked
_WARM_UP_SECONDS = 3600.0  # keys that return later than this are hardly worth caching


class _Batch:
    """Accesses at about the same time, which are counted together."""

    def __init__(self, time: float = math.nan, num_bytes: int = 0) -> None:
        self.time, self.num_bytes = time, num_bytes
        self.groups: list[int] = []
        self.near: list[int] = []
        """Distances in the streams' own caches."""
        self.far: list[int] = []
        """Distances in the shared cache, if there is one."""


class MissRatioCurve:
    """The miss-ratio curve of caches of the same size, one for each stream of lookups. Not thread-safe.

    ``rate`` is the rate of the samplers. ``max_keys`` limits the tracked keys. A key needs about 200 bytes,
    once for its stream's own cache and once for the shared one. ``half_lives`` gives the half-life of each
    window in seconds. Keys that a cache of ``largest_bytes`` would have evicted are forgotten.

    If there are too many keys, the curve lowers its threshold. It raises the threshold again when samplers
    offer more keys and ``max_keys`` permits it. Keys above the old threshold are tracked for an hour before
    they count.

    With ``shared``, the curve also counts the hits of a cache that all streams share *behind* their own
    caches.
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
        """Create an empty curve. Raises ValueError for invalid values."""
        if max_keys < 1 or not half_lives:
            raise ValueError("max_keys must be positive, and a half-life given")
        self._max_keys, self._largest = max_keys, largest_bytes
        self._threshold = self._tracked = threshold_of(rate)
        self._warming_since: float | None = None  # for keys between _threshold and _tracked
        self._stacks: dict[Hashable, RecencyStack] = {}
        self._shared = RecencyStack() if shared else None
        self.windows = [Window(seconds, smallest_bytes, largest_bytes) for seconds in half_lives]
        """Windows of the streams' own caches, in the order of ``half_lives``."""
        self.shared_windows = [
            Window(seconds, smallest_bytes, largest_bytes) for seconds in half_lives if shared
        ]
        """Windows of the shared cache, with hits that the streams' own caches miss."""
        self.pooled_windows = [Window(half_lives[0], smallest_bytes, largest_bytes)] if shared else []
        """Window of the shared cache as if the streams had no caches of their own; first half-life only."""
        self.stream_cache_bytes = 0.0
        """Size of each stream's own cache. Its hits don't count for the shared cache."""
        self.new_bytes = 0.0
        """Estimated bytes of all objects that were accessed for the first time, in all streams."""
        self.counts_from = -math.inf
        """Time of the first access that is counted. Earlier ones only set the order of keys, for example
        after ``Window.restore``."""
        self.num_keys = 0
        """Number of keys tracked now, once for each cache."""
        self._hot: set[int] = set()
        self._candidates: dict[int, int] = {}  # for hot keys, with the least number of accesses
        self._num_fed = 0
        self._update_windows(1.0)

    @property
    def all_windows(self) -> list[Window]:
        """All windows, of own, shared and pooled caches."""
        return [*self.windows, *self.shared_windows, *self.pooled_windows]

    @property
    def rate(self) -> float:
        """Share of all keys that is tracked now."""
        return self._threshold / HASHES

    @property
    def wanted_rate(self) -> float:
        """Rate to request from samplers, with which about half of ``max_keys`` would be tracked."""
        growth = self._max_keys / (2 * self.num_keys + 1)
        return max(self._tracked / HASHES, min(1.0, self.rate * growth) if growth >= _MIN_GROWTH else 0.0)

    def count_accesses(self, num_accesses: int, time: float = 0.0) -> None:
        """Count all accesses about ``time``, sampled or not, in all windows."""
        for window in self.all_windows:
            window.count(time, num_accesses)

    def hit_ratio(self, size_bytes: float) -> Estimate:
        """Estimate the hit ratio (per access) of caches of ``size_bytes`` each, in the first window."""
        return self.windows[0].hit_ratio(size_bytes)

    def feed(self, lookups: Iterable[Lookup]) -> None:
        """Add lookups in the order of their time."""
        batch = _Batch()
        for time, keys, num_bytes, stream in lookups:
            if self._threshold < HASHES:
                self._find_hot(keys)
            if self._tracked > self._threshold and self._is_warm(time):
                self._count(batch)
                batch = _Batch()
                self._raise_threshold()
            threshold, hot = self._tracked, self._hot
            tracked = [key for key in keys if key < threshold or key in hot]
            if not tracked:
                continue
            stack = self._stacks.get(stream)
            if stack is None:
                stack = self._stacks[stream] = RecencyStack()
            near = self._look_up(stack, tracked, num_bytes)
            far = self._look_up(self._shared, tracked, num_bytes) if self._shared is not None else ()
            if self._tracked > self._threshold:
                counts = [key < self._threshold or key in hot for key in tracked]
                tracked, near, far = (list(compress(values, counts)) for values in (tracked, near, far))
            if time > self.counts_from:
                if num_bytes != batch.num_bytes or not -_BATCH_SECONDS < time - batch.time < _BATCH_SECONDS:
                    self._count(batch)
                    batch = _Batch(time, num_bytes)
                batch.groups += [KNOWN if key in hot else key % NUM_GROUPS for key in tracked]
                batch.near += near
                batch.far += far
            if self.num_keys > self._max_keys:
                self._count(batch)
                batch = _Batch()
                self._lower_threshold()
        self._count(batch)

    def limit(self, rate: float, max_keys: int) -> None:
        """Count no more keys than samplers with this ``rate`` record, and track at most ``max_keys``.

        The curve tracks more keys than now if both limits permit it.
        """
        self._max_keys = max_keys
        offered = min(threshold_of(rate), threshold_of(self.wanted_rate))
        if offered < self._tracked:
            self._lower_threshold(min(offered, self._threshold))
        elif self.num_keys > max_keys:
            self._lower_threshold()
        elif self._tracked == self._threshold and offered >= _MIN_GROWTH * self._threshold:
            self._tracked, self._warming_since = offered, None

    def forget(self, stream: Hashable) -> None:
        """Forget the keys of a stream whose cache has ended; a new cache of this stream starts empty."""
        self.num_keys -= len(self._stacks.pop(stream, ()))

    def _look_up(self, stack: RecencyStack, keys: Sequence[int], num_bytes: int) -> list[int]:
        """Return the distances of all keys before any of them is touched; then touch them."""
        weightless = self._hot
        if self._tracked > self._threshold:  # keys that are warming up only have an order
            weightless = weightless.union(key for key in keys if key >= self._threshold)
        distances = stack.access(keys, num_bytes, weightless)
        self.num_keys += distances.count(UNTRACKED)
        if stack.num_bytes > self._max_stack_bytes:
            self.num_keys -= stack.forget_beyond(self._max_stack_bytes)
        return distances

    def _count(self, batch: _Batch) -> None:
        """Count accesses by their distances in the streams' own caches and in the shared cache."""
        time, num_bytes, groups, near, far = (
            batch.time, batch.num_bytes, batch.groups, batch.near, batch.far
        )  # fmt: skip
        if not groups:
            return
        if num_bytes != self.windows[0].row_bytes:
            self._update_windows(num_bytes)
        weight = HASHES / self._threshold
        self.new_bytes += near.count(UNTRACKED) * weight * num_bytes
        steps = self.windows[0].steps(near, weight, num_bytes)
        for window in self.windows:
            window.add(time, groups, steps, weight)
        if far:
            held = self.stream_cache_bytes / weight
            behind = [UNTRACKED if 0 <= n <= held else f for n, f in zip(near, far, strict=True)]
            steps = self.windows[0].steps(behind, weight, num_bytes)
            for window in self.shared_windows:
                window.add(time, groups, steps, weight)
            for window in self.pooled_windows:
                window.add(time, groups, window.steps(far, weight, num_bytes), weight)

    def _find_hot(self, keys: Sequence[int]) -> None:
        """Find every key with more than 1/_NUM_CANDIDATES of all accesses (Misra-Gries)."""
        self._num_fed += len(keys)
        candidates = self._candidates
        for key in keys:
            num_accesses = candidates[key] = candidates.get(key, 0) + 1
            if (
                not num_accesses % _HOT_AFTER
                and num_accesses * _NUM_CANDIDATES > self._num_fed
                and len(self._hot) < _MAX_HOT
            ):
                self._hot.add(key)
        while len(candidates) > _NUM_CANDIDATES:
            candidates = self._candidates = {key: num - 1 for key, num in candidates.items() if num > 1}

    def _lower_threshold(self, threshold: int | None = None) -> None:
        """Track fewer keys, and forget the others."""
        stacks = self._all_stacks()
        if threshold or self._tracked == self._threshold:  # otherwise dropping keys that warm up may suffice
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
        self._update_windows(self.windows[0].row_bytes)

    def _is_warm(self, time: float) -> bool:
        """Return whether the keys above the threshold were tracked for long enough to count."""
        if self._warming_since is None and time > -math.inf:
            self._warming_since = time
        return self._warming_since is not None and time - self._warming_since >= _WARM_UP_SECONDS

    def _raise_threshold(self) -> None:
        """Count all tracked keys from now on."""
        self._threshold = self._tracked
        if self._threshold == HASHES:
            self._hot.clear()
        row_bytes = self.windows[0].row_bytes
        for stack in self._all_stacks():
            stack.weigh(int(row_bytes), self._hot)
        self._update_windows(row_bytes)

    def _all_stacks(self) -> list[RecencyStack]:
        return [*self._stacks.values(), *([] if self._shared is None else [self._shared])]

    def _update_windows(self, row_bytes: float) -> None:
        self._max_stack_bytes = self._largest * self.rate
        for window in self.all_windows:
            window.rate, window.row_bytes = self.rate, row_bytes
