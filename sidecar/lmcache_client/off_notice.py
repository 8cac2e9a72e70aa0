"""Warnings that an engine runs without its cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_REPEAT_SECONDS = 600.0
NOT_CACHED = "this engine cannot be cached"
"""Beginning of a reason that no sidecar can change."""


class OffNotice:
    """Warns when the cache is off or the reason changes, and every ten minutes while callers say so again."""

    def __init__(self, option: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """``option``: name of the engine's option that decides whether there is a cache."""
        self._option = f" (see {option})" if option else ""
        self._clock = clock
        self._reason, self._due = "", 0.0

    def warn(self, reason: str) -> None:
        """Say that the cache is off."""
        now = self._clock()
        if reason != self._reason or now >= self._due:
            self._reason, self._due = reason, now + _REPEAT_SECONDS
            logger.warning(
                "LMCache Cluster is OFF, the engine runs without its cache: %s%s", reason, self._option
            )

    def repeat(self) -> None:
        """Say again that the cache is off, for the last reason; do nothing if there is none."""
        if self._reason:
            self.warn(self._reason)

    def clear(self) -> None:
        """Note that the cache is on."""
        self._reason = ""
