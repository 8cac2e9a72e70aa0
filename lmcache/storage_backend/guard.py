"""Protection around storage: turns faults of a medium into values, and refuses use after closing.

A medium is a disk or a remote server. Its **circuit** is a circuit breaker (``lmcache_store.tiers.circuit``).
After a fault, the circuit is open until a probe of the medium succeeds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.errors import TierUnavailableError

T = TypeVar("T")
D = TypeVar("D")

_GRACE_SECONDS = 10.0  # for calls that wait for a medium
_SECONDS_BETWEEN_LINES = 10.0


class FaultLog:
    """Counts faults, and logs at most one of them every ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_faults = 0
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # protects the count and the time
        self._next_line = float("-inf")

    def note(self, effect: str, error: object = "") -> None:
        """Count one fault; ``effect`` is the start of the log line, such as "A chunk was dropped"."""
        with self._lock:
            self.num_faults += 1
            if self._clock() < self._next_line:
                return
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
        reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self._logger.warning("%s: %s (%d faults so far)", effect, reason, self.num_faults)


class UseGate:
    """Allows the use of a resource until it is closed; closing waits for running uses."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0  # protected by _changed
        self._is_closed = False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Prevent closing during the ``with`` block. Yields False if closed: don't use the resource then."""
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
        """Allow no further use, and wait up to ten seconds for running uses."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_inside == 0, _GRACE_SECONDS)


class Guard(UseGate):
    """Runs operations on a medium.

    While its circuit is open it runs none, so an outage costs one time-out.
    """

    def __init__(self, circuit: Circuit, faults: FaultLog) -> None:
        super().__init__()
        self._circuit = circuit
        self._faults = faults

    def call(self, name: str, operation: Callable[[], T], default: D) -> T | D:
        """Return the result of ``operation``, or ``default`` if it fails or must not run.

        It must not run while the circuit is open, or after ``close``. Each of these cases counts as a fault.
        All exceptions are caught, because no cache failure may end an inference. A user's own connector to a
        remote store may raise any of them. OSError and TierUnavailableError are faults of the medium and open
        the circuit; all others concern only this key or value.
        """
        with self.enter() as may_use:
            if not may_use or self._circuit.is_open:
                self._faults.note(f"{name} was not tried", "the storage is unavailable or closed")
                return default
            try:
                result = operation()
            except Exception as error:
                self._faults.note(f"{name} failed", error)
                # The operation of a tier has opened the circuit before it raised the error.
                if isinstance(error, (OSError, TierUnavailableError)) and not self._circuit.is_open:
                    self._circuit.failure()
                return default
            self._circuit.success()
            return result

    def close(self) -> None:
        """End the circuit's probes, wait for running operations, and run no more."""
        self._circuit.end()
        super().close()
