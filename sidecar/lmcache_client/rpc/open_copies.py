"""Counts the copies from and to the arena that a client has open, over all its sessions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol


class CopySession(Protocol):
    """Part of a session that a count of open copies uses."""

    is_over: bool

    def check_present(self) -> None:
        """Raise StaleSessionError if the session is over."""


class OpenCopies:
    """The open ``copying`` blocks of one client; reports when older blocks, or marked ones, have closed."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        """``on_closed``: called when the last open block of ended sessions, or the last marked one closes."""
        # Protects the fields below, and orders the end of a session and the begin of its blocks.
        self._lock = threading.Lock()
        self._open: dict[object, CopySession] = {}
        self._marked: set[object] = set()
        self._on_closed = on_closed

    @property
    def is_drained(self) -> bool:
        """True if no block of a session that is over is open."""
        return not any(session.is_over for session in list(self._open.values()))

    @property
    def is_idle(self) -> bool:
        """True if no block is open at all."""
        return not self._open

    def mark(self) -> None:
        """Mark the blocks that are open now."""
        with self._lock:
            self._marked = set(self._open)

    @property
    def are_marked_closed(self) -> bool:
        """True if all blocks that were open at the last ``mark`` have been closed."""
        return not self._marked

    @contextlib.contextmanager
    def block(self, session: CopySession) -> Iterator[None]:
        """Hold a block open. Raises StaleSessionError if the session is over."""
        block = object()
        with self._lock:
            session.check_present()
            self._open[block] = session
        try:
            yield
        finally:
            with self._lock:
                del self._open[block]
                is_last = (session.is_over and self.is_drained) or self._marked == {block}
                self._marked.discard(block)
            if is_last:
                self._on_closed()

    def finish(self, session: CopySession) -> None:
        """End the session. From now on its open blocks count as blocks of an ended session."""
        with self._lock:
            session.is_over = True
