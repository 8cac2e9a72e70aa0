"""What stands before memory and media: their faults are values, and closed means closed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lmcache.tiers.circuit import Circuit
from lmcache.tiers.errors import TierUnavailableError

T = TypeVar("T")
D = TypeVar("D")

_GRACE_SECONDS = 10.0  # for calls that a medium holds up
_SECONDS_BETWEEN_LINES = 10.0


class FaultLog:
    """Counts faults, and writes a line about the first and then at most one every ten seconds."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_faults = 0
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # protects the count and the time
        self._next_line = float("-inf")

    def note(self, what: str, error: object = "") -> None:
        """Count one fault; ``what`` says what was lost by it."""
        with self._lock:
            self.num_faults += 1
            if self._clock() < self._next_line:
                return
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
        reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self._logger.warning("%s: %s (%d faults so far)", what, reason, self.num_faults)


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


class Guard(UseGate):
    """A medium that is unavailable costs one time-out: while its circuit is open nothing is asked of it."""

    def __init__(self, circuit: Circuit, faults: FaultLog) -> None:
        super().__init__()
        self._circuit = circuit
        self._faults = faults

    def call(self, what: str, operation: Callable[[], T], otherwise: D) -> T | D:
        """Return what ``operation`` returns, or ``otherwise`` after a fault, while the circuit is open, and
        once it is closed; all are counted.

        OSError and TierUnavailableError are faults of the medium, all others are of this key or value: no
        fault of a cache may end an inference, and a connector may be somebody else's.
        """
        with self.enter() as may_use:
            if not may_use or self._circuit.is_open:
                self._faults.note(f"{what} was not tried", "there are no answers at present")
                return otherwise
            try:
                result = operation()
            except Exception as error:
                self._faults.note(f"{what} failed", error)
                # A tier opens its circuit itself.
                if isinstance(error, (OSError, TierUnavailableError)) and not self._circuit.is_open:
                    self._circuit.failure()
                return otherwise
            self._circuit.success()
            return result

    def close(self) -> None:
        """End the probes, and wait for operations that are under way; nothing is asked any more."""
        self._circuit.end()
        super().close()
