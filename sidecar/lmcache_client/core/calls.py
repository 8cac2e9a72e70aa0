"""Calls to the sidecar. If the sidecar does not answer, further calls are skipped for a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarError, SidecarUnavailableError
from lmcache_client.rpc.session import SidecarSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_SECONDS = 1.0
"""Time without calls after a call that was not answered, so that a frozen sidecar delays no request."""


class Calls:
    """Attempts calls in a client's present session. Thread-safe."""

    def __init__(self, client: SidecarClient) -> None:
        self._client = client
        self._silent_epoch = 0  # epoch of the session that did not answer
        self._paused_until = 0.0

    @property
    def session(self) -> SidecarSession | None:
        """The present session, or None while its calls pause. A new session is never paused."""
        session = self._client.session
        if session is None or session.epoch != self._silent_epoch or time.monotonic() >= self._paused_until:
            return session
        return None

    def wait(self, deadline: float) -> SidecarSession | None:
        """Wait while calls pause. Returns the present session; None if there is none, or if the time is over.

        ``deadline``: a time of ``time.monotonic``.
        """
        while (session := self.session) is None and self._client.session is not None:
            now = time.monotonic()
            if now >= deadline:
                return None
            time.sleep(max(0.0, min(self._paused_until, deadline) - now))
        return session

    def attempt(self, call: Callable[[SidecarSession], T]) -> T | None:
        """Return the call's result. Returns None if the sidecar did not answer, or refused the call."""
        session = self.session
        if session is None:
            return None
        try:
            return call(session)
        except SidecarError as error:
            if isinstance(error, SidecarUnavailableError):
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                self._silent_epoch = session.epoch
            logger.debug("A call to the sidecar failed: %s", error)
            return None
