"""Warnings that an engine runs without its cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lmcache_store.common.logs import Reminders

logger = logging.getLogger(__name__)

NOT_CACHED = "this engine cannot be cached"
"""Beginning of a reason that no sidecar can change."""


class OffNotice:
    """Warns for each reason at once, and every ten minutes while callers report it."""

    def __init__(self, option: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """``option``: name of the engine's option that decides whether there is a cache."""
        self._option = f" (see {option})" if option else ""
        self._reminders = Reminders(clock)
        self._reason = ""

    def warn(self, reason: str) -> None:
        """Report that the cache is off."""
        self._reason = reason
        if self._reminders.is_due(reason):
            about = "LMCache Cluster is OFF, the engine runs without its cache: %s%s"
            logger.warning(about, reason, self._option)

    def repeat(self) -> None:
        """Report that the cache is still off, for the last reason. Do nothing if it is not off."""
        if self._reason:
            self.warn(self._reason)

    def clear(self) -> None:
        """Note that the cache is on."""
        self._reason = ""
        self._reminders.clear()
