"""Miss-ratio curves: what hit ratio would an LRU cache of any size have had on these accesses? Pure.

Fixed-size SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15): only keys whose
hash lies under a threshold are tracked; of them the exact stack distance in bytes is known, and divided by
the sampling rate it estimates that of all keys. When more keys are tracked than wanted, those with the
highest hashes go and the threshold comes down to theirs, so memory and time are bounded whatever the load.

**Hot keys.** The first chunk of a system prompt is sampled or not, and with it a large share of all accesses:
sampling alone would be points off. So samplers keep the head of every chain whatever its hash; the few keys
that turn out hot (Misra-Gries) are tracked apart from the others, with a weight of 1.

**The total is known** (``count_accesses``), and what sampling estimates it to be is not quite it. The error
of the total tells of the error of the hits: a regression over 16 independent subsamples says how much (a
control variate, where SHARDS-adj assumes all of it), and how much the subsamples differ gives the bounds.

**Ghosts.** Keys that no cache holds any more are tracked all the same: misses are samples, too.

**Chains.** A request's keys are fed tail first, as the tiers touch them: a chunk is then never nearer than
those it depends on, and a hit of the curve is a hit of a whole prefix.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import covariance
from typing import Any, NamedTuple

HASHES = 1 << 64
"""Key hashes are below this, uniformly distributed."""

_STATE_VERSION = 1
_NUM_GROUPS = 16  # independent subsamples: how much they differ is how uncertain the curve is
_STUDENT_T = 2.145  # 95 % of Student's distribution with 14 degrees of freedom lies within
_STEPS = 32  # distances are counted in steps of 1/32 octave, and interpolated within
_NUM_STEPS = 56 * _STEPS
_NUM_HEAVY = 128  # candidates for hot keys: those of more than 1/128 of the accesses are found
_HOT_AFTER = 64  # accesses
_MAX_HOT = 64
_UNTRACKED, _EXPIRED = -1, -2  # instead of a stack distance
_MAX_EXPONENT = 100  # of a weight, before all of them are scaled down


class Sample(NamedTuple):
    """One access to a sampled key."""

    time: float
    """Seconds, of any clock that all samplers share."""
    key_hash: int
    """Below HASHES."""
    num_bytes: int
    """That the object takes in a cache."""


class Estimate(NamedTuple):
    """Hit ratio of a cache of some size, and between what bounds it lies with 95 % confidence."""

    hit_ratio: float
    low: float
    high: float


class Sampler:
    """What runs on the hot path: a bounded ring of accesses to heads, and to keys under a threshold."""

    def __init__(self, rate: float = 1.0, max_samples: int = 1 << 16) -> None:
        """Raise ValueError for a ``rate`` (share of keys) that is not in (0, 1]."""
        self.num_accesses = 0  # all of them, sampled or not
        threshold = _threshold(rate)
        self._bound = threshold.to_bytes(8, "big") if threshold < HASHES else b"\xff" * 9
        self._ring: deque[Sample] = deque(maxlen=max_samples)

    def record(self, time: float, keys: Sequence[bytes], num_bytes: int) -> None:
        """Note one access to each of a request's keys, given tail first; they end in 8 uniformly distributed
        bytes."""
        self.num_accesses += len(keys)
        bound = self._bound
        kept = [tail for key in keys if (tail := key[-8:]) < bound]
        if keys and keys[-1][-8:] >= bound:
            kept.append(keys[-1][-8:])
        for tail in kept:
            self._ring.append(Sample(time, int.from_bytes(tail, "big"), num_bytes))

    def since(self, time: float) -> list[Sample]:
        """Return what is kept of the samples after ``time``, oldest first."""
        return [sample for sample in self._ring if sample.time > time]


class MissRatioCurve:
    """The curve of one stream of samples; not thread-safe.

    ``rate`` is that of the samplers; ``max_keys`` bounds what is tracked (about 200 bytes each). With
    ``half_life_seconds`` older accesses weigh less; a key not seen for ``window_seconds`` counts as new. A
    threshold that came down stays down: after a rare peak start a new curve from the latest samples.
    """

    def __init__(
        self,
        max_keys: int = 16_000,
        *,
        rate: float = 1.0,
        half_life_seconds: float = math.inf,
        window_seconds: float = math.inf,
    ) -> None:
        """Raise ValueError for values that make no sense."""
        if max_keys < 1 or not half_life_seconds > 0 or not window_seconds > 0:
            raise ValueError("max_keys, half_life_seconds and window_seconds must be positive")
        self._max_keys, self._window, self._half_life = max_keys, window_seconds, half_life_seconds
        self._threshold = _threshold(rate)
        self._stack = RecencyStack(max_keys + _MAX_HOT)
        self._highest: list[int] = []  # heap of the tracked keys' complements: the highest hash first
        self._counts = [_no_counts() for _ in range(_NUM_GROUPS)]  # hits, by distance
        self._sampled = [0.0] * _NUM_GROUPS  # accesses as estimated from the samples
        self._hot: dict[int, float] = {}  # hot keys, and accesses to them
        self._hot_counts = _no_counts()
        self._heavy: dict[int, int] = {}  # candidates, and how often they were seen at least
        self._num_fed = 0
        self._accesses = 0.0  # as counted; 0: nobody counts
        self._decay_start: float | None = None

    @property
    def rate(self) -> float:
        """Share of all keys that is tracked now."""
        return self._threshold / HASHES

    @property
    def num_keys(self) -> int:
        """Keys that are tracked now."""
        return len(self._stack)

    def count_accesses(self, num_accesses: int, time: float = 0.0) -> None:
        """Tell how many accesses there were, sampled or not, about ``time``."""
        self._accesses += num_accesses * self._scale(time)

    def feed(self, samples: Iterable[Sample]) -> None:
        """Add samples in the order of their time."""
        touch, hot, window, log2 = self._stack.touch, self._hot, self._window, math.log2
        weight = HASHES / self._threshold
        count = 1.0
        for time, key_hash, num_bytes in samples:
            if self._half_life != math.inf:
                count = self._scale(time)
            self._note_heavy(key_hash)
            if key_hash in hot:
                distance = touch(key_hash, 0, time, time - window)
                hot[key_hash] += count
                if distance >= 0:
                    self._hot_counts[_step(distance * weight + num_bytes)] += count
            elif 0 <= key_hash < self._threshold:
                distance = touch(key_hash, num_bytes, time, time - window)
                group = key_hash % _NUM_GROUPS
                self._sampled[group] += weight * count
                if distance > 0:
                    step = int(log2(distance * weight) * _STEPS)
                    self._counts[group][step if step < _NUM_STEPS else -1] += weight * count
                elif distance == _UNTRACKED:
                    heapq.heappush(self._highest, ~key_hash)
                    if len(self._highest) > self._max_keys:
                        self._lower_threshold()
                        weight = HASHES / self._threshold

    def hit_ratio(self, size_bytes: float) -> Estimate:
        """Estimate the hit ratio (per access) of a cache of ``size_bytes``; 0 when nothing was fed."""
        position = _STEPS * math.log2(max(1.0, size_bytes))
        hits = [_sum_below(counts, position) for counts in self._counts]
        num_hot = sum(self._hot.values())
        sampled = sum(self._sampled)
        total = max(self._accesses - num_hot, 0.0) or sampled
        if not total + num_hot:
            return Estimate(0.0, 0.0, 1.0)
        # 0 when all subsamples are alike.
        slope = covariance(self._sampled, hits) / (covariance(self._sampled, self._sampled) or 1.0)
        corrected = sum(hits) - slope * (sampled - total)
        residuals = [hit - slope * num for hit, num in zip(hits, self._sampled, strict=True)]
        # Two degrees of freedom went into the regression, of which covariance() knows one.
        variance = covariance(residuals, residuals) * (_NUM_GROUPS - 1) / (_NUM_GROUPS - 2)
        error = _STUDENT_T * math.sqrt(variance * _NUM_GROUPS)
        known = _sum_below(self._hot_counts, position)
        values = (corrected, corrected - error, corrected + error)
        return Estimate(*(min(1.0, max(0.0, (known + value) / (total + num_hot))) for value in values))

    def state(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can carry; ``from_state`` reads it."""
        return {
            "version": _STATE_VERSION,
            "max_keys": self._max_keys,
            "half_life_seconds": None if math.isinf(self._half_life) else self._half_life,
            "window_seconds": None if math.isinf(self._window) else self._window,
            "threshold": self._threshold,
            "keys": [list(entry) for entry in self._stack.entries()],
            "counts": [_sparse(counts) for counts in (*self._counts, self._hot_counts)],
            "sampled": list(self._sampled),
            "hot": list(self._hot.items()),
            "heavy": list(self._heavy.items()),
            "num_fed": self._num_fed,
            "accesses": self._accesses,
            "decay_start": self._decay_start,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MissRatioCurve:
        """Read what ``state`` returned. Raises ValueError for anything else."""
        try:
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"version {state['version']}, not {_STATE_VERSION}")
            curve = cls(
                int(state["max_keys"]),
                half_life_seconds=state["half_life_seconds"] or math.inf,
                window_seconds=state["window_seconds"] or math.inf,
            )
            curve._restore(state)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
            raise ValueError(f"not the state of a miss-ratio curve: {error}") from error
        return curve

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._threshold = int(state["threshold"])
        self._hot.update((int(key), float(count)) for key, count in state["hot"])
        self._heavy.update((int(key), int(count)) for key, count in state["heavy"])
        if not 0 < self._threshold <= HASHES or len(self._hot) > _MAX_HOT or len(self._heavy) > _NUM_HEAVY:
            raise ValueError("threshold or number of hot keys")
        if len(state["keys"]) > self._max_keys + _MAX_HOT:
            raise ValueError("number of keys")
        for key, num_bytes, time in state["keys"]:
            is_hot = key in self._hot
            if not (is_hot or 0 <= key < self._threshold) or num_bytes < 0:
                raise ValueError(f"key {key} of {num_bytes} bytes")
            self._stack.touch(int(key), int(num_bytes), float(time), -math.inf)
            if not is_hot:
                heapq.heappush(self._highest, ~int(key))
        for counts, stored in zip((*self._counts, self._hot_counts), state["counts"], strict=True):
            for step, count in stored.items():
                counts[int(step)] = float(count)
        self._sampled = [float(value) for _, value in zip(self._counts, state["sampled"], strict=True)]
        if not math.isfinite(sum(map(sum, (self._sampled, self._hot_counts, *self._counts)))):
            raise ValueError("counts that are not finite")
        self._num_fed, self._accesses = int(state["num_fed"]), float(state["accesses"])
        self._decay_start = (
            state["decay_start"] if state["decay_start"] is None else float(state["decay_start"])
        )

    def _note_heavy(self, key: int) -> None:
        """Misra-Gries: no key with more than 1/_NUM_HEAVY of all accesses goes unnoticed."""
        self._num_fed += 1
        heavy = self._heavy
        num_seen = heavy[key] = heavy.get(key, 0) + 1
        if len(heavy) > _NUM_HEAVY:
            self._heavy = {key: num - 1 for key, num in heavy.items() if num > 1}
        elif num_seen == _HOT_AFTER or num_seen % 1024 == 0:
            is_hot = num_seen * _NUM_HEAVY > self._num_fed
            if is_hot and key not in self._hot and len(self._hot) < _MAX_HOT:
                self._hot[key] = 0.0

    def _lower_threshold(self) -> None:
        """Stop tracking the key with the highest hash, and sample only those below it."""
        self._threshold = ~heapq.heappop(self._highest)
        if self._threshold not in self._hot:
            self._stack.forget(self._threshold)

    def _scale(self, time: float) -> float:
        """Weight of an access at ``time``: instead of the old losing weight, the new gain it."""
        if math.isinf(self._half_life):
            return 1.0
        if self._decay_start is None:
            self._decay_start = time
        exponent = (time - self._decay_start) / self._half_life
        if exponent > _MAX_EXPONENT:
            self._rescale(math.pow(2.0, -min(exponent, 1000.0)))
            self._decay_start, exponent = time, 0.0
        return math.pow(2.0, max(exponent, -1000.0))

    def _rescale(self, factor: float) -> None:
        for counts in (*self._counts, self._hot_counts):
            counts[:] = array("d", [count * factor for count in counts])
        self._sampled[:] = [value * factor for value in self._sampled]
        self._hot.update((key, count * factor) for key, count in self._hot.items())
        self._accesses *= factor


def merged(streams: Iterable[Iterable[Sample]]) -> Iterable[Sample]:
    """Merge the samples of several processes, each in the order of time, into one stream."""
    return heapq.merge(*streams, key=lambda sample: sample.time)


def stack_distances(accesses: Sequence[int]) -> list[int]:
    """Return how many distinct keys were accessed since the last access to each, itself included; 0 for the
    first access."""
    stack = RecencyStack(len(set(accesses)) or 1)
    return [max(0, stack.touch(key, 1, 0.0, 0.0)) for key in accesses]


class RecencyStack:
    """Keys in the order of their last access, and the sum of bytes from any of them on.

    Every access takes the next of a fixed number of positions; sums are kept over positions, groups and
    groups of groups, so that a distance takes three sums of short lists. When positions run out the keys move
    together.
    """

    def __init__(self, max_keys: int) -> None:
        self._shift = max(2, math.ceil(math.log2(2 * max_keys) / 3))
        capacity = 1 << 3 * self._shift
        self._position: dict[int, int] = {}
        self._next = 0
        self._keys: list[int] = [0] * capacity
        self._times = array("d", bytes(8 * capacity))
        self._bytes = [0] * capacity
        self._groups = [0] * (capacity >> self._shift)
        self._supers = [0] * (capacity >> 2 * self._shift)

    def __len__(self) -> int:
        return len(self._position)

    def touch(self, key: int, num_bytes: int, time: float, oldest: float) -> int:
        """Move a key to the young end. Return its stack distance in bytes, itself included; _EXPIRED when it
        was not seen since ``oldest``, _UNTRACKED when it is new."""
        shift = self._shift
        old = self._position.get(key)
        distance = _UNTRACKED
        if old is not None:
            group, above = old >> shift, old >> 2 * shift
            distance = (
                sum(self._bytes[old : (group + 1) << shift])
                + sum(self._groups[group + 1 : (above + 1) << shift])
                + sum(self._supers[above + 1 :])
                if self._times[old] >= oldest
                else _EXPIRED
            )
            self._take_out(old)
        if self._next == len(self._keys):
            self._move_together(old)
        new = self._next
        self._next += 1
        self._position[key] = new
        self._keys[new] = key
        self._times[new] = time
        self._bytes[new] = num_bytes
        self._groups[new >> shift] += num_bytes
        self._supers[new >> 2 * shift] += num_bytes
        return distance

    def forget(self, key: int) -> None:
        """Stop tracking a key."""
        self._take_out(self._position.pop(key))

    def entries(self) -> Iterator[tuple[int, int, float]]:
        """All keys, oldest first: (key, bytes, time of the last access)."""
        for position in sorted(self._position.values()):
            yield self._keys[position], self._bytes[position], self._times[position]

    def _take_out(self, position: int) -> None:
        num_bytes = self._bytes[position]
        self._bytes[position] = 0
        self._groups[position >> self._shift] -= num_bytes
        self._supers[position >> 2 * self._shift] -= num_bytes

    def _move_together(self, left: int | None) -> None:
        """Close the gaps in place; nothing is at position ``left`` any more."""
        used = sorted(self._position.values())
        used.remove(left) if left is not None else None
        for new, old in enumerate(used):
            self._position[self._keys[old]] = new
            self._keys[new], self._times[new] = self._keys[old], self._times[old]
            self._bytes[new] = self._bytes[old]
        self._next = len(used)
        self._bytes[self._next :] = [0] * (len(self._bytes) - self._next)
        width = 1 << self._shift
        self._groups = [sum(self._bytes[i : i + width]) for i in range(0, len(self._bytes), width)]
        self._supers = [sum(self._groups[i : i + width]) for i in range(0, len(self._groups), width)]


def _step(distance: float) -> int:
    return min(_NUM_STEPS - 1, int(math.log2(distance) * _STEPS)) if distance > 1 else 0


def _sum_below(counts: array[float], position: float) -> float:
    """Sum of counts below a position in steps, linear within a step."""
    step = min(int(position), _NUM_STEPS - 1)
    below: float = sum(counts[:step])
    return below + counts[step] * min(1.0, position - step)


def _no_counts() -> array[float]:
    return array("d", bytes(8 * _NUM_STEPS))


def _sparse(counts: array[float]) -> dict[str, float]:
    return {str(step): count for step, count in enumerate(counts) if count}


def _threshold(rate: float) -> int:
    """Return below what hashes are sampled. Raises ValueError."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate {rate}: the share of keys that is sampled lies in (0, 1]")
    return max(1, int(rate * HASHES))
