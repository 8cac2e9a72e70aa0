"""A connector whose faults are values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lmcache.logging import init_logger
from lmcache.storage_backend.connector.base_connector import RemoteConnector
from lmcache.storage_backend.faults import FaultLog
from lmcache.tiers.resilience import CircuitBreaker

_log = init_logger(__name__)

T = TypeVar("T")


class Guard:
    """Stands before a connector: a fault of the server is a value, and a server that is away costs one
    time-out.

    After a fault nothing is asked of the server, and a thread of the guard's own tries, ever more seldom, up
    to every two seconds, whether it is back.
    """

    def __init__(self, connector: RemoteConnector, faults: FaultLog) -> None:
        self._connector = connector
        self._faults = faults
        self._lock = threading.Lock()  # protects _trials, and the breaker as far as that depends on it
        self._trials: threading.Thread | None = None
        self._breaker = CircuitBreaker(base=0.1, cap=2.0)
        self._closed = threading.Event()

    @property
    def is_open(self) -> bool:
        """Is the server to be left alone?"""
        return self._breaker.is_open or self._closed.is_set()

    def call(self, what: str, operation: Callable[[], T], otherwise: T) -> T:
        """Return what ``operation`` returns, or ``otherwise`` after a fault and while the server is left
        alone."""
        if self.is_open:
            return otherwise
        try:
            result = operation()
        except (ValueError, TypeError) as error:  # of this key or value: the server has nothing to do with it
            self._faults.note(f"{what} failed", error)
            return otherwise
        except Exception as error:
            self._faults.note(f"{what} failed, the server is left alone until it answers again", error)
            self._leave_alone()
            return otherwise
        self._breaker.success()
        return result

    def close(self) -> None:
        """End the trials, and close the connector."""
        with self._lock:
            self._closed.set()
            trials = self._trials
        if trials is not None:
            trials.join()
        self._connector.close()

    def _leave_alone(self) -> None:
        with self._lock:
            self._breaker.failure()
            if self._trials is None and not self._closed.is_set():
                self._trials = threading.Thread(target=self._try_again, name="remote trials", daemon=True)
                self._trials.start()

    def _try_again(self) -> None:
        while not self._closed.wait(self._breaker.seconds_to_trial):
            try:
                self._connector.exists("lmcache trial")
            except Exception:
                self._breaker.failure()
                continue
            with self._lock:
                self._trials = None
                self._breaker.trial_succeeded()
            _log.info("The remote server answers again")
            return
