"""The memory tier grows and shrinks to the size that it is to have now, while engines use it.

**Growing**: the arena populates more, as its container has room; more rows are ready, and clients are told.

**Shrinking**, in this order, so that nobody can read KV where other KV or nothing is:

1. Slots beyond are given out no more, and rows there are evicted: index and slot table say so first. What
   somebody has in use is waited for.
2. Workers are asked to let go, in a numbered round: each answers when the copies that began before have
   ended and its device has nothing of those rows pinned. A device would go on with pages that it has pinned:
   with old KV, once that part of the arena is populated again. So the readers of GPUs are ended, too.
3. The memory goes back.

Each step looks at what is so now, and can be repeated: another size may be asked for, and the process may
end, at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmcache.units import format_size
from lmcache_sidecar.copiers.copier import SidecarCopier
from lmcache_sidecar.followed import SizeFile
from lmcache_sidecar.sessions import Sessions

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 128
"""Evicted in about 1 ms."""


class Resizer:
    """One event loop owns it; ``size`` is followed by somebody else."""

    def __init__(
        self, sessions: Sessions, copier: SidecarCopier, size: SizeFile, announce: Callable[[], None]
    ) -> None:
        """``announce``: called when clients are to be told of a round."""
        self._announce = announce
        self._sessions, self._copier, self._size = sessions, copier, size
        self._arena = sessions.arena
        self._asked = 0  # bytes; by the last step
        self._num_rounds = 0
        self._wait = ""

    @property
    def target_bytes(self) -> int:
        """What is asked for."""
        return self._size.num_bytes

    @property
    def problem(self) -> str:
        """Why the memory tier is not (yet) as large as it is to be; empty: it is, or is on its way."""
        return self._size.problem or self._wait or self._arena.growth_error or self._least

    @property
    def _least(self) -> str:
        arena = self._arena
        least = arena.bytes_of(arena.target_rows)
        if least <= arena.target_bytes:
            return ""
        return f"it can't be smaller than {format_size(least)}: its tables are those of --memory-max-size"

    def step(self) -> bool:
        """Do what can be done now, for about 1 ms; is there more to do at once?"""
        arena, wanted = self._arena, self._size.num_bytes
        if wanted != self._asked:
            self._asked = wanted
            self._end_round()
        if arena.rows_within(wanted) >= arena.target_rows and wanted != arena.target_bytes:
            arena.resize(wanted)
        if arena.rows_within(wanted) == arena.target_rows and not arena.has_surplus:
            self._wait = ""
            self._end_round()
            return False
        return self._shrink(wanted)

    def note_bug(self, error: Exception) -> None:
        """A step ended with it: the next one tries again."""
        problem = f"the sidecar has a bug, see its log, and tries again: {error!r}"
        if problem != self._wait:
            logger.error("The memory tier does not get to its size", exc_info=error)
        self._wait = problem

    def _shrink(self, wanted: int) -> bool:
        sessions, arena = self._sessions, self._arena
        if too_old := sessions.clients.that_can_not_let_go():
            self._wait = f"the memory tier stays as large as it is: {too_old}, can't let go of memory"
            self._end_round()
            return False
        if sessions.store is not None:
            evicted, blocked = sessions.store.memory.vacate(arena.rows_within(wanted), _ROWS_AT_ONCE)
            users = ", ".join(f"{number} {how}" for how, number in sorted(blocked.items()))
            self._wait = f"rows beyond the size that is asked for are in use: {users}" if blocked else ""
            if evicted >= _ROWS_AT_ONCE or blocked:
                return evicted >= _ROWS_AT_ONCE
        if not sessions.round:
            self._num_rounds += 1
            arena.resize(wanted)
            sessions.round = self._num_rounds
            self._announce()
        if holder := sessions.clients.holding(sessions.round):
            self._wait = f"memory beyond the size that is asked for is held: waits for {holder}"
        elif not self._copier.let_go():
            self._wait = "waits for the reader of a GPU to end"
        else:
            arena.give_back()
            self._wait = ""
            self._end_round()
        return False

    def _end_round(self) -> None:
        """Nobody is asked for anything any more, and what is ready may be used."""
        self._sessions.round = 0
        if self._sessions.store is not None:
            self._sessions.store.memory.usable_slots = None
