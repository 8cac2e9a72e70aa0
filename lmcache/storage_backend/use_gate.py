"""Closed means closed: no call uses what is given back, and none is surprised that it is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GRACE_SECONDS = 10.0  # for calls that a medium holds up


class UseGate:
    """Lets users in until it is closed; closing waits until those inside have left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0  # protected by _changed
        self._is_closed = False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Keep things as they are inside the ``with`` block. Gives False when it is closed: they are gone."""
        with self._changed:
            is_open = not self._is_closed
            self._num_inside += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._changed:
                    self._num_inside -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait, ten seconds at most, for those inside."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_inside == 0, _GRACE_SECONDS)
