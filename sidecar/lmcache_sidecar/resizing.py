"""Grow and shrink the memory tier to its target size while engines use it.

**Growing**: the arena populates more memory, up to the limit of its container. The sidecar then announces the
new rows to its clients.

**Shrinking** takes these steps, in this order. No client can therefore read a row whose memory was reused or
given back:

1. The sidecar stops giving out slots beyond the target, and evicts the rows in them. It removes the rows from
   the index and the slot table first. It waits for rows in use.
2. The sidecar asks the workers to release these rows, in a numbered round. A worker answers when its earlier
   copies have ended and its device has none of the rows pinned. The sidecar also ends the readers of GPUs.
3. The sidecar gives the memory back to the kernel.

Pinned pages matter because a device continues to use them: it would read old KV after that part of the arena
is populated again.

Each step starts from the present state and can be repeated, because the target may change, and the process
may end, at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmcache_sidecar.copiers.copier import SidecarCopier
from lmcache_sidecar.files.watched_files import SizeFile
from lmcache_sidecar.sessions import Sessions
from lmcache_store.common.units import format_size

logger = logging.getLogger(__name__)

_ROWS_PER_STEP = 128
"""Rows to evict in one step; they take about 1 ms."""


class Resizer:
    """Resizes the memory tier step by step. One event loop owns it; its owner calls ``size.follow``."""

    def __init__(
        self, sessions: Sessions, copier: SidecarCopier, size: SizeFile, announce: Callable[[], None]
    ) -> None:
        """``announce`` is called when a round starts, to notify the clients."""
        self._announce = announce
        self._sessions, self._copier, self.size = sessions, copier, size
        self._arena = sessions.arena
        self._last_target = 0  # bytes; target of the last step
        self._num_rounds = 0
        self._wait = ""

    @property
    def problem(self) -> str:
        """Reason why the memory tier does not have its target size; empty if it has, or grows to it."""
        return self.size.problem or self._wait or self._arena.growth_error or self._size_limit

    @property
    def _size_limit(self) -> str:
        arena = self._arena
        smallest = arena.bytes_of(arena.target_rows)
        if smallest <= arena.target_bytes:
            return ""
        return f"the smallest size is {format_size(smallest)}: the tables are sized for --memory-max-size"

    def step(self) -> bool:
        """Do what is possible now, in about 1 ms. Returns True if more can be done at once."""
        arena, wanted = self._arena, self.size.num_bytes
        if wanted != self._last_target:
            self._last_target = wanted
            self._end_round()
        if arena.rows_within(wanted) >= arena.target_rows and wanted != arena.target_bytes:
            arena.resize(wanted)
        if arena.rows_within(wanted) == arena.target_rows and not arena.has_surplus:
            self._wait = ""
            self._end_round()
            return False
        return self._shrink(wanted)

    def note_bug(self, error: Exception) -> None:
        """Report an unexpected error of a step. The next step tries again."""
        problem = f"resizing failed and is retried; this is a bug, see the sidecar's log: {error!r}"
        if problem != self._wait:
            logger.error("Resizing the memory tier failed; the sidecar tries again", exc_info=error)
        self._wait = problem

    def _shrink(self, wanted: int) -> bool:
        sessions, arena = self._sessions, self._arena
        if sessions.store is not None:
            evicted, blocked = sessions.store.memory.vacate(arena.rows_within(wanted), _ROWS_PER_STEP)
            users = ", ".join(f"{number} {how}" for how, number in sorted(blocked.items()))
            self._wait = f"rows beyond the target size are in use: {users}" if blocked else ""
            if evicted >= _ROWS_PER_STEP or blocked:
                return evicted >= _ROWS_PER_STEP
        if not sessions.release_round:
            self._num_rounds += 1
            arena.resize(wanted)
            sessions.release_round = self._num_rounds
            self._announce()
        if holder := sessions.clients.first_holder(sessions.release_round):
            self._wait = f"memory beyond the target size is not yet released by {holder}"
        elif not self._copier.release_surplus():
            self._wait = "the sidecar waits for the reader of a GPU to end"
        else:
            arena.release_surplus()
            self._wait = ""
            self._end_round()
        return False

    def _end_round(self) -> None:
        """End the round of releases, and allow the use of all ready rows again."""
        self._sessions.release_round = 0
        if self._sessions.store is not None:
            self._sessions.store.memory.usable_slots = None
