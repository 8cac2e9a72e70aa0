"""How long a sidecar that did not answer is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from lmcache.rpc.client import Session

_SECONDS = 1.0


class Pause:
    """No calls for a while after one without an answer: a frozen sidecar must cost requests nothing.

    It ends with the session, since whoever took the next Attach does answer. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = 0
        self._ends_at = 0.0

    def begin(self, session: Session) -> None:
        """A call of this session was not answered."""
        self._epoch, self._ends_at = session.epoch, self._clock() + _SECONDS

    def covers(self, session: Session) -> bool:
        """Should this session not be called now?"""
        return session.epoch == self._epoch and self._clock() < self._ends_at
