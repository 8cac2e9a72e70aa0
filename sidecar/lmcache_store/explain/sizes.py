"""Hits of larger memory tiers, by the miss-ratio curve of a sidecar's samples. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from lmcache_store.common.units import format_size
from lmcache_store.curves import Lookup, MissRatioCurve
from lmcache_store.curves.answers import samples

_MIN_SAMPLES = 1000
"""Samples below which the curve says nothing useful."""
_FACTORS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LARGEST_BYTES = 2.0**55
_SHOWN = (1, 2, 4)


class LargerMemory(NamedTuple):
    """Sizes of the memory tier, and their hits among the recent requests."""

    size_bytes: int
    """Present size."""
    hit_ratios: dict[int, float]
    """Hit ratio by multiple of the present size."""
    factor: float
    """Smallest multiple that would have kept most of the evicted chunks."""
    retained_share: float
    """Share of the evicted chunks that this multiple would have kept."""

    def advice(self) -> str:
        """Return what to do, for people."""
        share = f"{100 * self.retained_share:.0f} %"
        size = format_size(round(self.size_bytes * self.factor))
        ratios = ", ".join(
            f"{100 * ratio:.0f} % with {'the present size' if factor == 1 else f'{factor} x the size'}"
            for factor, ratio in self.hit_ratios.items()
        )
        return (
            f"A memory tier of {self.factor:g} x the size ({size}) would have kept {share} of them, "
            f"by samples of recent requests. It would hit: {ratios}."
        )


def larger_memory(answer: Any, size_bytes: int, capacity_bytes: int) -> LargerMemory | None:
    """Return what larger sizes would have hit; None if the samples say too little.

    ``answer``: the sidecar's ``/samples``. ``size_bytes``: bytes of the memory tier, of which rows can use
    ``capacity_bytes``. Raises InvalidAnswerError.
    """
    sampled = samples(answer)
    if capacity_bytes <= 0 or len(sampled.keys) < _MIN_SAMPLES:
        return None
    curve = MissRatioCurve(max_keys=len(sampled.keys), rate=sampled.rate)
    curve.feed(Lookup(time, keys, sampled.row_bytes) for time, keys in sampled.requests())
    window = curve.windows[0]
    evicted = window.between(capacity_bytes, _LARGEST_BYTES)
    if evicted.share <= evicted.error:
        return None
    gains = [
        (factor, window.between(capacity_bytes, factor * capacity_bytes).share / evicted.share)
        for factor in _FACTORS
    ]
    factor, retained_share = next((gain for gain in gains if gain[1] >= 0.5), (0, 0.0))
    if not factor:
        return None
    ratios = {shown: window.hit_ratio(shown * capacity_bytes).hit_ratio for shown in _SHOWN}
    return LargerMemory(size_bytes, ratios, factor, min(1.0, retained_share))
