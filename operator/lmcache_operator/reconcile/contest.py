"""Notices when somebody else keeps undoing what the operator writes.

Healing a field that another controller changes back at once would go on for ever and load the API server.
After three take-backs within a minute the child is left alone for a while, and a condition says so.
"""

from __future__ import annotations

from ..specs.kinds import Ref

_NUM_TAKE_BACKS = 3
_WINDOW_SECONDS = 60.0
_PAUSE_SECONDS = 600.0


class ContestLog:
    """Per child of one cluster: how often it was healed lately."""

    def __init__(self) -> None:
        self._healed: dict[Ref, list[float]] = {}
        self._contested: dict[Ref, tuple[float, str]] = {}
        """Until when to leave a child alone, and the field that is contested."""

    def note_healing(self, ref: Ref, where: str, now: float) -> None:
        """The field `where` of a child was not as it had been applied, and is being healed."""
        times = [time for time in self._healed.get(ref, []) if now - time < _WINDOW_SECONDS] + [now]
        if len(times) > _NUM_TAKE_BACKS:
            self._contested[ref] = now + _PAUSE_SECONDS, where
            times = []
        self._healed[ref] = times

    def contested(self, now: float) -> dict[Ref, str]:
        """Children to leave alone at present, with the field that is contested."""
        return {ref: where for ref, (until, where) in self._contested.items() if now < until}
