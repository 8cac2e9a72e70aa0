"""What is told of decisions, what is done about them, and what of them survives a restart. Pure.

Sizes are only ever compared with what was declared when they were chosen: whoever declares another size means
that one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache.units import format_size
from lmcache_operator.autoscaling.state import Decision, Point

MAX_STATE_BYTES = 64 << 10
"""Of a ``Report.state``."""

_NEAR = 0.05
_SMALL = 0.02  # of money and of shares: that is nothing to anybody
_FIGURE = re.compile(r"-?\d+(?:\.\d+)?")
_EXACT = ("current", "next", "recommended")
_UNTOLD = ("keysInSize", "observedAt", "reason", "samples")
"""Fields whose figures alone are no news."""


class Choice(NamedTuple):
    """A size that mode Auto has chosen: bytes of one pod's memory, or a number of shards."""

    size: int
    instead_of: int
    """What was declared then."""


@dataclass(frozen=True)
class Report:
    """What is known of a cluster, as of its latest decision."""

    status: Mapping[str, Any]
    """``status.autoscaling`` of the resource; of its figures ``steady`` tells only those that are news."""
    memory: Choice | None = None
    """None: each pod has what is declared."""
    shards: Choice | None = None
    state: str = ""
    """What has to survive a restart. It had better stay the same while nothing is looked up."""

    def __post_init__(self) -> None:
        if (size := len(self.state.encode())) > MAX_STATE_BYTES:
            raise ValueError(f"a state of {size} bytes: no more than {MAX_STATE_BYTES} are kept")


class Saved(NamedTuple):
    """What a restart finds."""

    memory: Choice | None
    shards: Choice | None
    state: str


def save(report: Report) -> dict[str, str]:
    """The data of a ConfigMap, which ``restore`` reads."""
    sizes = {"memory": report.memory, "shards": report.shards}
    known = {name: choice._asdict() for name, choice in sizes.items() if choice}
    data = {"sizes": json.dumps(known), "state": report.state}
    return data | {"digest": _digest(data)}


def restore(data: Mapping[str, Any]) -> Saved:
    """What ``save`` was given. Raises ValueError for anything else, edited by hand or damaged."""
    try:
        kept = {name: data[name] for name in ("sizes", "state")}
        if data["digest"] != _digest(kept):
            raise ValueError("it was edited")
        choices = {name: Choice(**own) for name, own in json.loads(kept["sizes"]).items()}
        return Saved(choices.pop("memory", None), choices.pop("shards", None), kept["state"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a part is missing: {error}") from error


def _digest(data: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def tier_status(decision: Decision, points: Sequence[Point], shard_bytes: float = 0.0) -> dict[str, Any]:
    """What ``status.autoscaling`` says of one tier; ``shard_bytes``: it is the remote one."""

    def told(size: float) -> str | int:
        return round(size / shard_bytes) if shard_bytes else format_size(round(size))

    sizes = {"current": decision.size, "recommended": decision.recommended, "next": decision.next}
    found: dict[str, Any] = {name: told(size) for name, size in sizes.items() if 0 < size < math.inf}
    found |= {"reason": decision.reason, "limitedBy": decision.limited_by}
    if decision.target != decision.size and math.isfinite(decision.saving + decision.saving_error):
        usd, error = decision.saving, decision.saving_error
        found["saving"] = {
            name: f"{round(amount, 3) + 0.0:.3f}"
            for name, amount in (("usdPerHour", usd), ("low", usd - error), ("high", usd + error))
        }
    if points and all(math.isfinite(figure) for point in points for figure in point):
        found["curve"] = [
            {
                "size": format_size(round(point.size)),
                "hit": f"{point.hits:.3f}", "low": f"{point.low:.3f}", "high": f"{point.high:.3f}",
                "netPerHour": f"{round(point.net, 3) + 0.0:.3f}",  # never "-0.000"
            }
            for point in points
        ]  # fmt: skip
    return found


def steady(former: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The former status as long as the new one says nearly the same: one that is told, is told whole."""
    return former if _is_same(former, found, "") else found


def _is_same(one: Any, other: Any, name: str) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key], key) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_is_same(*pair, name) for pair in zip(one, other, strict=True))
    if name in _EXACT:
        return bool(one == other)
    texts = str(one), str(other)
    bare = [_FIGURE.sub("0", text) for text in texts]
    if bare[0] != bare[1] or name in _UNTOLD:
        return bare[0] == bare[1]
    figures = zip(*([float(figure) for figure in _FIGURE.findall(text)] for text in texts), strict=True)
    return all(math.isclose(*pair, rel_tol=_NEAR, abs_tol=_SMALL) for pair in figures)
