"""Notices when somebody else keeps undoing what the operator writes.

Repairing a field that another controller changes back at once would go on for ever and load the API server.
Three times it is repaired at once; after that the field, and no other, is left alone for longer and longer,
and a condition says so. An operator of another version takes no field: it renders the whole child otherwise,
which is then left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lmcache.backoff import Backoff
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.ownership import Path

_NUM_FREE = 3
_FORGET_SECONDS = 60.0
"""Quiet for that long after the last pause: the next time counts as the first."""
_PAUSE = Backoff(base=30.0, cap=600.0)

Contested = Mapping[Ref, frozenset[Path]]
"""Fields to leave alone at present, by child."""


class _Contest(NamedTuple):
    num_times: int
    until: float
    """End of the pause; the time of the last repair if there is none."""


class ContestLog:
    """Of one cluster: how often each field of a child was repaired recently."""

    def __init__(self) -> None:
        self._contests: dict[tuple[Ref, Path], _Contest] = {}
        self._written: dict[Ref, Path] = {}

    def note_repair(self, ref: Ref, path: Path, now: float) -> None:
        """A field was not as it had been applied, and was repaired; () stands for a child that was gone."""
        for known, contest in list(self._contests.items()):
            if now >= contest.until + _FORGET_SECONDS:
                del self._contests[known]
        times = self._contests.get((ref, path), _Contest(0, now)).num_times + 1
        pause = _PAUSE.seconds(times - _NUM_FREE) if times > _NUM_FREE else 0.0
        self._contests[ref, path] = _Contest(times, now + pause)

    def note_write(self, ref: Ref, rendering: Path, now: float, *, is_repair: bool) -> None:
        """A child was written. The same over another as the time before: somebody had written that other."""
        if not is_repair and self._written.get(ref) == rendering:
            self.note_repair(ref, rendering, now)
        self._written[ref] = rendering

    def contested(self, now: float) -> Contested:
        """Fields to leave alone at present."""
        found: dict[Ref, frozenset[Path]] = {}
        for (ref, path), contest in self._contests.items():
            if now < contest.until:
                found[ref] = found.get(ref, frozenset()) | {path}
        return found
