"""Notices when somebody else keeps undoing what the operator writes.

Healing a field that another controller changes back at once would go on for ever and load the API server.
After three take-backs within a minute the child is left alone for a while, and a condition says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..specs.kinds import Ref

_NUM_TAKE_BACKS = 3
_WINDOW_SECONDS = 60.0
_PAUSE_SECONDS = 600.0


@dataclass
class _Record:
    times: list[float] = field(default_factory=list)
    """When fields were healed lately."""
    where: str = ""
    contested_since: float | None = None


class ContestLog:
    """Per child of one cluster: how often it was healed lately."""

    def __init__(self) -> None:
        self._records: dict[Ref, _Record] = {}

    def note_healing(self, ref: Ref, where: str, now: float) -> None:
        """The field `where` of a child was not as it had been applied, and is being healed."""
        record = self._records.setdefault(ref, _Record())
        record.times = [time for time in record.times if now - time < _WINDOW_SECONDS] + [now]
        record.where = where
        if len(record.times) > _NUM_TAKE_BACKS:
            record.contested_since = now
            record.times = []

    def contested(self, now: float) -> dict[Ref, str]:
        """Children to leave alone at present, with the field that is contested."""
        found = {}
        for ref, record in self._records.items():
            if record.contested_since is not None and now - record.contested_since < _PAUSE_SECONDS:
                found[ref] = record.where
        return found
