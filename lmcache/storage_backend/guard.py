"""What stands before a medium that may be away, so that its faults are values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache.storage_backend.faults import FaultLog
from lmcache.storage_backend.use_gate import UseGate
from lmcache.tiers.circuit import CircuitBreaker
from lmcache.tiers.errors import TierUnavailableError

T = TypeVar("T")
D = TypeVar("D")


class Guard:
    """A medium that is away costs one time-out: from then on nothing is asked of it.

    A thread that lives only as long as the circuit is open calls ``try_again``, which asks the medium once
    and closes the circuit if it is back.
    """

    def __init__(self, breaker: CircuitBreaker, try_again: Callable[[], object], faults: FaultLog) -> None:
        self._breaker = breaker
        self._try_again = try_again
        self._faults = faults
        self._closed = threading.Event()
        self._gate = UseGate()
        self._lock = threading.Lock()  # protects _trials: there is a thread whenever the circuit is open
        self._trials: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Is the medium left alone?"""
        return self._breaker.is_open or self._closed.is_set()

    def call(self, what: str, operation: Callable[[], T], otherwise: D) -> T | D:
        """Return what ``operation`` returns, or ``otherwise`` after a fault, while the circuit is open, and
        once it is closed; all are counted.

        OSError and TierUnavailableError are faults of the medium, all others are of this key or value: no
        fault of a cache may end an inference, and a connector may be somebody else's.
        """
        with self._gate.enter() as may_use:
            if not may_use or self.is_open:
                self._faults.note(f"{what} was not tried", "there are no answers at present")
                return otherwise
            try:
                result = operation()
            except Exception as error:
                self._faults.note(f"{what} failed", error)
                if isinstance(error, (OSError, TierUnavailableError)):
                    self._leave_alone()
                return otherwise
            self._breaker.success()
            return result

    def close(self) -> None:
        """End the trials, and wait for operations that are under way; nothing is asked any more."""
        with self._lock:
            self._closed.set()
            trials = self._trials
        if trials is not None:
            trials.join()
        self._gate.close()

    def _leave_alone(self) -> None:
        with self._lock:
            if not self._breaker.is_open:  # a tier opens its circuit itself
                self._breaker.failure()
            if self._trials is None and not self._closed.is_set():
                trials = threading.Thread(target=self._keep_trying, name="trials", daemon=True)
                try:
                    trials.start()
                except RuntimeError:  # there can't be another thread: the next call is the trial
                    self._breaker.trial_succeeded()
                else:
                    self._trials = trials

    def _keep_trying(self) -> None:
        while not self._closed.wait(self._breaker.seconds_to_trial):
            try:
                self._try_again()
            except Exception as error:  # the last trial would leave the medium alone for good
                self._breaker.failure()
                self._faults.note("A trial ended with an error", error)
            with self._lock:
                if not self._breaker.is_open:
                    self._trials = None
                    return
