"""A time window of a curve: counts of accesses by stack distance, in 16 independent subsamples."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

NUM_GROUPS = 16
"""Number of independent subsamples; their differences show how uncertain the curve is."""
KNOWN = NUM_GROUPS
"""Group of the hot keys, all of which are tracked instead of sampled."""
MISS = -1
"""Step of an access that no cache would have hit."""

_STUDENT_T = 2.145  # 95 % of Student's distribution with 14 degrees of freedom are within this value
_STEPS = 16  # per octave; hits are interpolated within a step
_MAX_EXPONENT = 100  # of a weight; above it, all weights are scaled down
_STATE_VERSION = 2
_NOT_A_STATE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, zlib.error, struct.error)
_HALF_MAX = 60_000.0  # states store counts in half precision, whose largest number is slightly more


class Estimate(NamedTuple):
    """Hit ratio of a cache of some size, and its bounds with 95 % confidence."""

    hit_ratio: float
    low: float
    high: float


class Difference(NamedTuple):
    """Additional hits of a larger cache, compared with a smaller one."""

    share: float
    """Additional hits as a share of all accesses."""
    error: float
    """Largest error of the share with 95 % confidence."""


class Window:
    """Counts of accesses, in which the weight of an access decays with a half-life (``inf``: no decay).

    The window distinguishes distances between ``smallest_bytes`` and ``largest_bytes``. Smaller distances
    count as ``smallest_bytes``, and larger ones as misses.
    """

    def __init__(self, half_life_seconds: float, smallest_bytes: float, largest_bytes: float) -> None:
        """Create an empty window. Raises ValueError for invalid values."""
        if not half_life_seconds > 0 or not 0 < smallest_bytes < largest_bytes < math.inf:
            raise ValueError("a half-life must be positive, and smallest_bytes below largest_bytes")
        self.half_life_seconds = half_life_seconds
        self._first = math.log2(smallest_bytes) * _STEPS
        self.num_steps = math.ceil(math.log2(largest_bytes) * _STEPS - self._first)
        self.rate = 1.0
        """Share of all keys that is tracked now."""
        self.row_bytes = 1.0
        """Bytes of one key at the latest access."""
        self.restart(-math.inf)

    def restart(self, time: float) -> None:
        """Forget everything, and count only accesses from ``time`` on."""
        self.begin = time
        self._hits = array("d", bytes(8 * self.num_steps * (NUM_GROUPS + 1)))  # by group and distance
        self._sampled = [0.0] * (NUM_GROUPS + 1)  # accesses as estimated from the samples, by group
        self._weights = 0.0  # sum over these accesses of the number that each sample represents
        self._counted = self._counted_hits = self._seconds = 0.0
        self._origin: float | None = None  # the time at which an access has weight 1
        self._latest = time
        self._below: list[array[float]] | None = None  # cached cumulative hits by group and step

    def steps(self, distances: Iterable[int], weight: float, num_bytes: int) -> list[int]:
        """Return the step in which each distance in sampled bytes is counted, or MISS.

        The distance among all keys is the sampled distance times ``weight``, except for the key itself.
        """
        log2, first, last = math.log2, self._first, self.num_steps - 1
        steps = []
        for distance in distances:
            step = MISS
            if distance >= 0:
                bytes_of_all = (distance - num_bytes) * weight + num_bytes
                step = int(log2(bytes_of_all) * _STEPS - first) if bytes_of_all > 1 else 0
                step = MISS if step > last else max(step, 0)
            steps.append(step)
        return steps

    def add(self, time: float, groups: Sequence[int], steps: Iterable[int], weight: float) -> None:
        """Add accesses. Each represents ``weight`` accesses, or one if its group is KNOWN."""
        if time < self.begin:
            return
        known = 1.0 if self.half_life_seconds == math.inf else self._weight(time)
        weighted = known * weight
        sampled, hits, num_steps, self._below = self._sampled, self._hits, self.num_steps, None
        self._weights += weighted * weight * (len(groups) - groups.count(KNOWN))
        for group, step in zip(groups, steps, strict=True):
            count = known if group == KNOWN else weighted
            sampled[group] += count
            if step >= 0:
                hits[group * num_steps + step] += count

    def count(self, time: float, num_accesses: float, num_hits: float = 0.0, seconds: float = 0.0) -> None:
        """Count all accesses about ``time``, sampled or not, with their hits and the seconds they took."""
        if time < self.begin:
            return
        weight = self._weight(time)
        self._counted += weight * num_accesses
        self._counted_hits += weight * num_hits
        self._seconds += weight * seconds

    @property
    def num_accesses(self) -> float:
        """Sum of the weights of all accesses; a new access has weight 1."""
        total = self._total()
        return total / self._weight(self._latest) if total else 0.0

    @property
    def accesses_per_hour(self) -> float:
        """Accesses per hour, or 0 if ``count`` was never given seconds."""
        return 3600 * self._total() / self._seconds if self._seconds else 0.0

    @property
    def measured_hits(self) -> float:
        """Share of hits among the accesses that ``count`` was given."""
        return self._counted_hits / self._counted if self._counted else 0.0

    def hit_ratio(self, size_bytes: float) -> Estimate:
        """Estimate the hit ratio (per access) of a cache of ``size_bytes``; 0 if nothing was counted."""
        share, error = self.between(0.0, size_bytes)
        return Estimate(*(min(1.0, max(0.0, value)) for value in (share, share - error, share + error)))

    def between(self, smaller_bytes: float, larger_bytes: float) -> Difference:
        """Return the hits of a cache of ``larger_bytes`` that one of ``smaller_bytes`` would miss.

        The result is (0, 1) if nothing was counted.
        """
        if not self._total():
            return Difference(0.0, 1.0)
        share, groups = self._difference(smaller_bytes, larger_bytes)
        rate = self._rate()
        if rate >= 1:
            return Difference(share, 0.0)
        # A sample of almost all keys has a smaller error, but not as small as if all keys were alike.
        missing = min(1.0, 2 * math.sqrt(1 - rate))
        # All groups share one stack, whose distances are as inaccurate as the number of keys in it.
        num_keys = rate * (smaller_bytes or larger_bytes) / self.row_bytes
        error = min(0.5, 2 * missing / math.sqrt(max(num_keys, 1.0)))
        scales = (1 - error, 1 + error)
        shifted = (self._difference(smaller_bytes * scale, larger_bytes * scale)[0] for scale in scales)
        stack_error = max(abs(value - share) for value in shifted)
        return Difference(share, math.hypot(groups * missing, stack_error))

    def _difference(self, smaller: float, larger: float) -> tuple[float, float]:
        """Return the share of accesses, corrected by the known total, and its error from the groups."""
        pairs = zip(self._hits_below(smaller), self._hits_below(larger), strict=True)
        *hits, known = (high - low for low, high in pairs)
        sampled = self._sampled[:NUM_GROUPS]
        counted = self._counted - self._sampled[KNOWN]
        mean, mean_hits = sum(sampled) / NUM_GROUPS, sum(hits) / NUM_GROUPS
        spread = sum((value - mean) ** 2 for value in sampled)
        # The slope is 0 if all subsamples are alike.
        slope = sum((x - mean) * (y - mean_hits) for x, y in zip(sampled, hits, strict=True)) / (spread or 1)
        offset = mean_hits - slope * mean
        rest = sum((y - slope * x - offset) ** 2 for x, y in zip(sampled, hits, strict=True))
        # The regression used two degrees of freedom.
        error = _STUDENT_T * math.sqrt(rest / (NUM_GROUPS - 2) * NUM_GROUPS)
        corrected = sum(hits) - slope * (sum(sampled) - counted if counted > 0 else 0.0)
        total = self._total()
        return (known + corrected) / total, error / total

    def _rate(self) -> float:
        """Return the effective sampling rate of all counted accesses, at most the present rate.

        Earlier accesses may have other rates. A few samples that represent many accesses make the result
        uncertain, even if there are many other samples.
        """
        estimated = sum(self._sampled[:NUM_GROUPS])
        return min(self.rate, round(estimated / self._weights, 6)) if self._weights else self.rate

    def _total(self) -> float:
        return self._counted if self._counted > self._sampled[KNOWN] else sum(self._sampled)

    def _hits_below(self, size_bytes: float) -> list[float]:
        """Return the hits of a cache of this size by group, interpolated linearly within a step."""
        if self._below is None:
            rows = (self._hits[i : i + self.num_steps] for i in range(0, len(self._hits), self.num_steps))
            self._below = [array("d", accumulate(row, initial=0.0)) for row in rows]
        position = math.log2(size_bytes) * _STEPS - self._first if size_bytes > 0 else 0.0
        position = min(max(position, 0.0), self.num_steps)
        step = min(int(position), self.num_steps - 1)
        part = position - step
        return [sums[step] + part * (sums[step + 1] - sums[step]) for sums in self._below]

    def _weight(self, time: float) -> float:
        """Return the weight of an access at ``time``.

        New accesses gain weight instead of old ones losing it.
        """
        if math.isinf(self.half_life_seconds) or math.isinf(time):  # no decay, or no access yet
            return 1.0
        if self._origin is None:
            self._origin = time
        if time < self._latest - self.half_life_seconds:  # the clock was set back: counted accesses don't age
            self._origin += time - self._latest
            self._latest = time
        self._latest = max(self._latest, time)
        exponent = (time - self._origin) / self.half_life_seconds
        if exponent > _MAX_EXPONENT:
            self._scale(math.pow(2.0, -min(exponent, 1000.0)))
            self._origin, exponent = time, 0.0
        return math.pow(2.0, max(exponent, -1000.0))

    def _scale(self, factor: float) -> None:
        self._hits = array("d", [count * factor for count in self._hits])
        self._sampled = [value * factor for value in self._sampled]
        self._counted, self._counted_hits = self._counted * factor, self._counted_hits * factor
        self._seconds, self._weights = self._seconds * factor, self._weights * factor
        self._below = None

    def state(self) -> dict[str, Any]:
        """Return the window as JSON-compatible values, 1 to 2 KiB per octave of distances."""
        self._scale(1 / self._weight(self._latest))
        self._origin = self._latest
        unit = (max(self._hits) or 1.0) / _HALF_MAX
        packed = struct.pack(f"<{len(self._hits)}e", *(count / unit for count in self._hits))
        sums = (self._counted, self._counted_hits, self._seconds, self._rate(), self.row_bytes)
        return {
            "version": _STATE_VERSION,
            "shape": [self.half_life_seconds, self._first, self.num_steps],
            "latest": self._latest,
            "hits": base64.b85encode(zlib.compress(packed)).decode(),
            "sums": [unit, *sums, *self._sampled],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()`` of a window with the same shape.

        Raises ValueError for any other value, and then changes nothing.
        """
        try:
            if state["version"] != _STATE_VERSION:
                raise ValueError(f"version {state['version']}, not {_STATE_VERSION}")
            if list(state["shape"]) != [self.half_life_seconds, self._first, self.num_steps]:
                raise ValueError(f"shape {state['shape']}")
            packed = zlib.decompressobj().decompress(base64.b85decode(state["hits"]), 2 * len(self._hits) + 1)
            hits = struct.unpack(f"<{len(self._hits)}e", packed)
            latest, *sums = (float(value) for value in (state["latest"], *state["sums"]))
            unit, counted, counted_hits, seconds, rate, row_bytes, *sampled = sums
            if len(sampled) != NUM_GROUPS + 1 or not all(0 <= value < math.inf for value in (*hits, *sums)):
                raise ValueError("counts")
            if not latest < math.inf or not 0 < rate <= 1 or not row_bytes:
                raise ValueError("time, rate or bytes")
        except _NOT_A_STATE as error:
            raise ValueError(f"not the state of a window like this one: {error}") from error
        self.restart(self.begin)
        self._hits, self._sampled = array("d", [count * unit for count in hits]), sampled
        self._counted, self._counted_hits, self._seconds = counted, counted_hits, seconds
        self.rate, self.row_bytes = rate, row_bytes
        self._latest = self._origin = latest
        self._weights = sum(sampled[:NUM_GROUPS]) / rate
