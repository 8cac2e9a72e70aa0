"""What stands before a medium that may be unavailable, so that its faults are values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lmcache.storage_backend.faults import FaultLog
from lmcache.storage_backend.use_gate import UseGate
from lmcache.tiers.circuit import Circuit
from lmcache.tiers.errors import TierUnavailableError

T = TypeVar("T")
D = TypeVar("D")


class Guard:
    """A medium that is unavailable costs one time-out: while its circuit is open nothing is asked of it."""

    def __init__(self, circuit: Circuit, faults: FaultLog) -> None:
        self._circuit = circuit
        self._faults = faults
        self._gate = UseGate()

    def call(self, what: str, operation: Callable[[], T], otherwise: D) -> T | D:
        """Return what ``operation`` returns, or ``otherwise`` after a fault, while the circuit is open, and
        once it is closed; all are counted.

        OSError and TierUnavailableError are faults of the medium, all others are of this key or value: no
        fault of a cache may end an inference, and a connector may be somebody else's.
        """
        with self._gate.enter() as may_use:
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
        self._gate.close()
