"""Detects that another client keeps undoing the operator's writes.

If another controller changes a field back at once, repairs would go on forever and load the API server. The
operator repairs a field three times at once. Then it pauses the repair of this field, longer each time, and a
condition reports it. A second operator of another version contests no single field, but the rendering of the
whole child. The operator then pauses writes of that child.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.ownership import Path
from lmcache_store.common.backoff import Backoff

_NUM_FREE = 3
_FORGET_SECONDS = 60.0
"""Time after the last pause without a repair, after which the count starts again."""
_PAUSE = Backoff(base=30.0, cap=600.0)

Contested = Mapping[Ref, frozenset[Path]]
"""Fields whose repair is paused, by child."""


class _Contest(NamedTuple):
    num_times: int
    until: float
    """End of the pause, or the time of the last repair if there is no pause."""


class ContestLog:
    """Recent repairs of each field of a cluster's children."""

    def __init__(self) -> None:
        self._contests: dict[tuple[Ref, Path], _Contest] = {}
        self._written: dict[Ref, Path] = {}

    def note_repair(self, ref: Ref, path: Path, now: float) -> None:
        """Record the repair of a field that another client changed; () stands for a deleted child."""
        for known, contest in list(self._contests.items()):
            if now >= contest.until + _FORGET_SECONDS:
                del self._contests[known]
        times = self._contests.get((ref, path), _Contest(0, now)).num_times + 1
        pause = _PAUSE.seconds(times - _NUM_FREE) if times > _NUM_FREE else 0.0
        self._contests[ref, path] = _Contest(times, now + pause)

    def note_write(self, ref: Ref, rendering: Path, now: float, *, is_repair: bool) -> None:
        """Record the write of a child. Writing the same rendering twice in a row, without a lost field in
        between, means that another operator wrote a different rendering."""
        if not is_repair and self._written.get(ref) == rendering:
            self.note_repair(ref, rendering, now)
        self._written[ref] = rendering

    def contested(self, now: float) -> Contested:
        """Fields whose repair is paused at present."""
        paused: dict[Ref, frozenset[Path]] = {}
        for (ref, path), contest in self._contests.items():
            if now < contest.until:
                paused[ref] = paused.get(ref, frozenset()) | {path}
        return paused
