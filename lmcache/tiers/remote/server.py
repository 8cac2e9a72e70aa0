"""One server of the remote tier: its pool of connections and its circuit breaker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lmcache.tiers.circuit import CircuitBreaker, RetryStale
from lmcache.tiers.errors import ServerError, TierUnavailableError
from lmcache.tiers.remote.resp import Connection

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RETRY = RetryStale()
_SILENT_SECONDS = 60.0


class Server:
    """Thread-safe; ``connect`` makes a new connection, wherever the server is by then.

    Whoever meets an open circuit whose trial is due starts it in a thread and does not wait for it, so that a
    server that nobody watches comes back by itself.
    """

    errors_when_well = frozenset({"MISCONF", "NOPERM", "NOREPLICAS", "OOM", "READONLY", "WRONGTYPE"})
    """Error replies that are about what was asked."""

    errors_when_sick = frozenset({"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOAUTH", "WRONGPASS"})
    """Error replies that whatever is asked would get. What any other says of the server, PING tells."""

    def __init__(self, name: str, connect: Callable[[], Connection], on_failure: Callable[[], None]) -> None:
        self.name = name
        self.breaker = CircuitBreaker()
        self._connect = connect
        self._on_failure = on_failure
        self._lock = threading.Lock()  # protects what follows
        self._idle: list[Connection] = []
        self._is_closed = False
        self._is_on_trial = False
        self._said = ""  # in the log, of why it is away
        self._silent_until = 0.0  # of the same
        self._is_said = False  # and not yet that it is back

    def run(self, operation: Callable[[Connection], T], *, asking: bool = False) -> T:
        """Do this on a connection. Raises TierUnavailableError when the server is sick or its circuit is
        open, and ServerError when it is well and answers so."""
        if self.breaker.is_open:
            self._start_trial()
            raise TierUnavailableError(f"remote tier {self.name} is away")
        try:
            result = self._attempt(operation, asking=asking)
        except (OSError, ServerError) as error:
            if self._is_about_the_call(error) or self._answers_otherwise(error):
                if getattr(error, "code", "") == "READONLY":  # the master is another one by now: look for it
                    self._drop_idle()
                raise
            self._note_failure()
            self._on_failure()
            self._say(str(error))
            raise TierUnavailableError(f"remote tier {self.name}: {error}") from error
        self.breaker.success()
        return result

    def try_again(self) -> bool:
        """Ask the server whether it is well, and close its circuit if so."""
        try:
            self._attempt(lambda connection: connection.call("PING"))
        except (OSError, ServerError) as error:
            if not self._is_about_the_call(error):
                self._note_failure()
                logger.debug("remote tier %s is still away: %s", self.name, error)
                return False
        if self.breaker.is_open:
            self.breaker.trial_succeeded()
            logger.log(logging.INFO if self._is_said else logging.DEBUG, "remote tier %s is back", self.name)
            self._is_said = False
        return True

    def close(self) -> None:
        """Close all connections, those in use when they are given back."""
        with self._lock:
            self._is_closed = True
        self._drop_idle()

    def _is_about_the_call(self, error: Exception) -> bool:
        return isinstance(error, ServerError) and error.code in self.errors_when_well

    def _answers_otherwise(self, error: Exception) -> bool:
        """One row may be more than a server takes: ERR, and the connection closed."""
        if not isinstance(error, ServerError) or error.code in self.errors_when_sick:
            return False
        try:
            self._attempt(lambda connection: connection.call("PING"))
        except (OSError, ServerError):
            return False
        return True

    def _say(self, problem: str) -> None:
        """A server that answers trials and fails at work would fill the log."""
        now = time.monotonic()
        level = logging.DEBUG if problem == self._said and now < self._silent_until else logging.WARNING
        if level == logging.WARNING:
            self._said, self._silent_until, self._is_said = problem, now + _SILENT_SECONDS, True
        logger.log(level, "remote tier %s: %s", self.name, problem)

    def _start_trial(self) -> None:
        with self._lock:
            if self._is_on_trial or self._is_closed or self.breaker.seconds_to_trial:
                return
            self._is_on_trial = True
        threading.Thread(target=self._trial, name=f"trial of {self.name}", daemon=True).start()

    def _trial(self) -> None:
        try:
            self.try_again()
        finally:
            self._is_on_trial = False

    def _note_failure(self) -> None:
        self.breaker.failure()
        self._drop_idle()  # a new connection finds a new master, or a new address of the same name

    def _attempt(self, operation: Callable[[Connection], T], *, asking: bool = False) -> T:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        try:
            return self._use(idle or self._open(), operation, asking=asking)
        except OSError as error:
            if not _RETRY.allows(error, was_idle=idle is not None):
                raise
        self.breaker.doubt()
        return self._use(self._open(), operation, asking=asking)

    def _open(self) -> Connection:
        try:
            return self._connect()
        except ServerError as error:  # whatever it is: nothing can be asked
            raise ConnectionError(str(error)) from error

    def _use(self, connection: Connection, operation: Callable[[Connection], T], *, asking: bool) -> T:
        connection.asking = asking
        try:
            return operation(connection)
        finally:
            self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_settled and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
