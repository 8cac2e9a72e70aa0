"""Autoscaling decisions as reported in status, applied to pods, and persisted in the ConfigMap. Pure.

A chosen size is valid only for the declared size that it replaces. If you change the declared size, the
operator applies your new value.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_operator.policy.state import Decision, Point
from lmcache_store.common.units import format_size

MAX_STATE_BYTES = 64 << 10
"""Largest ``Report.state``."""

_RELATIVE_CHANGE, _ABSOLUTE_CHANGE = 0.05, 0.02
"""A figure that changes by less than either is not worth an update; the latter is for USD and shares."""
_FIGURE = re.compile(r"-?\d+(?:\.\d+)?")
_EXACT = ("current", "next", "recommended")
_IGNORED_FIGURES = ("keysInSize", "observedAt", "reason", "samples")
"""Fields whose figures alone are not worth an update."""


class Choice(NamedTuple):
    """A size that mode Auto chose: bytes of one pod's memory, or a number of shards."""

    size: int
    instead_of: int
    """Declared size at the time of the choice."""


@dataclass(frozen=True)
class Report:
    """Results of the latest decision about a cluster."""

    status: Mapping[str, Any]
    """``status.autoscaling`` of the resource, with all figures; ``steady`` drops small changes."""
    memory: Choice | None = None
    """Chosen size of each pod's memory tier; None: the declared size applies."""
    shards: Choice | None = None
    state: str = ""
    """State that must survive a restart. A change of it writes the ConfigMap."""

    def __post_init__(self) -> None:
        if (size := len(self.state.encode())) > MAX_STATE_BYTES:
            raise ValueError(f"autoscaling state of {size} bytes exceeds {MAX_STATE_BYTES} bytes")


class Saved(NamedTuple):
    """Choices and state as the ConfigMap stores them."""

    memory: Choice | None
    shards: Choice | None
    state: str


def save(report: Report) -> dict[str, str]:
    """Return the data of a ConfigMap that ``restore`` reads."""
    sizes = {"memory": report.memory, "shards": report.shards}
    chosen = {name: choice._asdict() for name, choice in sizes.items() if choice}
    data = {"sizes": json.dumps(chosen), "state": report.state}
    return data | {"digest": _digest(data)}


def restore(data: Mapping[str, Any]) -> Saved:
    """Read the result of ``save``. Raises ValueError if the data was edited or is damaged."""
    try:
        content = {name: data[name] for name in ("sizes", "state")}
        if data["digest"] != _digest(content):
            raise ValueError("the digest does not match: the ConfigMap was edited")
        choices = {name: Choice(**fields) for name, fields in json.loads(content["sizes"]).items()}
        return Saved(choices.pop("memory", None), choices.pop("shards", None), content["state"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the ConfigMap is incomplete: {error!r}") from error


def _digest(data: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def tier_status(decision: Decision, points: Sequence[Point], shard_bytes: float = 0.0) -> dict[str, Any]:
    """Return the block of one tier in ``status.autoscaling``.

    With ``shard_bytes``, it is the block of the remote tier, with sizes as numbers of shards.
    """

    def formatted(size: float) -> str | int:
        return round(size / shard_bytes) if shard_bytes else format_size(size)

    sizes = {"current": decision.size, "recommended": decision.recommended, "next": decision.next}
    status: dict[str, Any] = {name: formatted(size) for name, size in sizes.items() if 0 < size < math.inf}
    status |= {"reason": decision.reason, "limitedBy": decision.limited_by}
    if decision.target != decision.size and math.isfinite(decision.saving + decision.saving_error):
        usd, error = decision.saving, decision.saving_error
        status["saving"] = {
            name: f"{round(amount, 3) + 0.0:.3f}"
            for name, amount in (("usdPerHour", usd), ("low", usd - error), ("high", usd + error))
        }
    if points and all(math.isfinite(figure) for point in points for figure in point):
        status["curve"] = [
            {
                "size": format_size(point.size),
                "hit": f"{point.hits:.3f}", "low": f"{point.low:.3f}", "high": f"{point.high:.3f}",
                "netPerHour": f"{round(point.net, 3) + 0.0:.3f}",  # never "-0.000"
            }
            for point in points
        ]  # fmt: skip
    return status


def steady(
    former: Mapping[str, Any], current: Mapping[str, Any], absolute_change: float = _ABSOLUTE_CHANGE
) -> Mapping[str, Any]:
    """Return the former status unless a change is worth an update, and then the whole current status.

    Sizes are compared exactly. Other figures may change a little; those in ``_IGNORED_FIGURES`` do not count.
    ``absolute_change``: largest change of a small figure that is not worth an update, in the figure's unit.
    """
    return former if _is_same(former, current, "", absolute_change) else current


def _is_same(old: Any, new: Any, name: str, absolute: float) -> bool:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_is_same(old[key], new[key], key, absolute) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=False)
        return len(old) == len(new) and all(_is_same(*pair, name, absolute) for pair in pairs)
    if name in _EXACT:
        return bool(old == new)
    texts = str(old), str(new)
    masked = [_FIGURE.sub("0", text) for text in texts]
    if masked[0] != masked[1] or name in _IGNORED_FIGURES:
        return masked[0] == masked[1]
    figures = zip(*([float(figure) for figure in _FIGURE.findall(text)] for text in texts), strict=True)
    return all(math.isclose(*pair, rel_tol=_RELATIVE_CHANGE, abs_tol=absolute) for pair in figures)
