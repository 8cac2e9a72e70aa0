"""Figures of all sidecars of a cluster, for the status. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.policy.report import steady
from lmcache_operator.specs import Object

SHARE_POINTS = 2
"""A share in per cent that changes by at most this many points is not worth an update."""


def summable(observed: Observed) -> Sequence[SidecarState]:
    """The sidecars whose figures can be summed.

    None if one of them missed an answer and may give the next one: sums without it would fall and rise again.
    """
    return observed.probed.sidecars if observed.probed and observed.probed.is_certain else ()


def percent_of(part: int, whole: int) -> int:
    """A share in per cent. ``whole`` is positive."""
    return min(100, 100 * part // whole)


def steady_figures(former: Any, current: Object, absolute_change: float = 0.0) -> Object:
    """The former figures while there are no new ones, or only small changes, to avoid writes."""
    figures = former if isinstance(former, Mapping) else {}
    return dict(steady(figures, current, absolute_change)) if current else dict(figures)
