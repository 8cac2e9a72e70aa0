"""The past of a cluster's cache, as values over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Values = Sequence[float]
"""One value for each time; NaN where Prometheus has none."""


@dataclass(frozen=True)
class History:
    """Figures of a cluster over time, as Prometheus recorded them."""

    times: Values = ()
    """Seconds since 1970, at equal distances."""
    tokens: Mapping[str, Values] = field(default_factory=dict)
    """Prompt tokens per second, by cause."""
    used: Mapping[str, Values] = field(default_factory=dict)
    """Bytes in use, by tier."""
    sizes: Mapping[str, Values] = field(default_factory=dict)
    """Bytes of a tier's size, by tier, as far as they are known."""
    problem: str = ""
    """Why the past is not known; empty: it is."""
