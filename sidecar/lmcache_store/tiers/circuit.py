"""Circuit breaker: whether to send requests to a medium.

::

    closed --failure--> open --back-off--> half-open: one probe --answer--> closed
                          ^                                  |
                          +------------- failure ------------+

A medium that is down, slow or frozen costs one deadline once. While its circuit is open, requests skip the
medium. Only the circuit's own thread probes it. See docs/adr/0013.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from lmcache_store.common.backoff import Backoff
from lmcache_store.common.recent import Recent
from lmcache_store.tiers.base import MediumHealth
from lmcache_store.tiers.errors import TierError, TierUnavailableError

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 60.0  # interval in which the log does not repeat the same problem
_MAX_PROBLEMS = 16  # logged problems to remember


class Circuit(MediumHealth):
    """The circuit of one medium. Thread-safe.

    ``probe`` sends the medium a request, and raises when the medium is unhealthy. It runs in a thread that
    lives while the circuit is open. The first probe runs after ``base`` seconds. Each further failure doubles
    the pause, up to ``cap``. A successful probe closes the circuit but does not reset this count. A medium
    that answers probes but fails under load is therefore used less and less often.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        *,
        base: float = 0.05,
        cap: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.name = name
        self._probe = probe
        self._backoff = Backoff(base, cap)
        self._clock = clock
        self._ended = threading.Event()
        self._lock = threading.Lock()  # protects the following
        self._failures = 0  # in a row
        self._next_probe: float | None = None  # None: closed
        self._num_outages = 0
        self._prober: threading.Thread | None = None  # while the circuit is open
        self._problem = ""  # the last known problem
        self._logged: Recent[str, float] = Recent(_MAX_PROBLEMS)  # problem, and when it was logged
        self._is_recovery_due = False  # is a log line about the recovery due?

    @property
    def is_open(self) -> bool:
        """See Health."""
        return self._next_probe is not None

    @property
    def num_outages(self) -> int:
        """See Health."""
        return self._num_outages

    @property
    def problem(self) -> str:
        """See Health."""
        return self._problem if self.is_open else ""

    @property
    def seconds_to_probe(self) -> float:
        """Seconds until a probe is due; 0 when it is, or when the circuit is closed."""
        return max(0.0, (self._next_probe or 0.0) - self._clock())

    def check(self) -> None:
        """Raise TierUnavailableError while the circuit is open."""
        if self.is_open:
            raise TierUnavailableError(f"{self.name} is unavailable")

    def success(self) -> None:
        """Record a successful operation: reset the count of failures, and close the circuit."""
        if self._failures:
            with self._lock:
                self._failures = 0
            self._close()

    def failure(self, problem: object = None) -> TierUnavailableError:
        """Record a failed operation: open the circuit. Returns the error to raise.

        ``problem`` is logged, but the same problem at most once a minute: a medium that answers probes but
        fails under load would fill the log."""
        if problem is not None:
            self._log(str(problem))
        self._open()
        self.notify(True)
        return TierUnavailableError(f"{self.name}: {problem}")

    def restarted(self) -> None:
        """Record that the medium was restarted: stored objects may be lost."""
        with self._lock:
            self._num_outages += 1

    def probe(self) -> bool:
        """Probe the medium now, and close the circuit if the probe succeeds."""
        try:
            self._probe()
        except Exception as error:  # any error: only this thread probes again
            if isinstance(error, (OSError, TierError)):
                self._log(str(error))  # a probe may meet another problem than the operation before
            else:
                self._log(repr(error), bug=error)
            self._open()
            return False
        self._close()
        return True

    def end(self, timeout_seconds: float | None = None) -> None:
        """Stop probing for good, and wait for a running probe. The circuit never opens again."""
        self._ended.set()
        with self._lock:
            prober, self._next_probe = self._prober, None
        if prober is not None and prober is not threading.current_thread():
            prober.join(timeout_seconds)

    def _open(self) -> None:
        with self._lock:
            self._failures += 1
            if self._ended.is_set():
                return
            self._next_probe = self._clock() + self._backoff.seconds(self._failures)
            if self._prober is None:
                prober = threading.Thread(target=self._keep_probing, name=f"probe {self.name}", daemon=True)
                try:
                    prober.start()
                    self._prober = prober
                except RuntimeError:  # no thread can be started: the next operation is the probe
                    self._next_probe = None

    def _close(self) -> None:
        with self._lock:
            was_open, self._next_probe = self.is_open, None
            self._num_outages += was_open
        if was_open:
            level = logging.INFO if self._is_recovery_due else logging.DEBUG
            logger.log(level, "%s is available again", self.name)
            self._is_recovery_due = False
            self.notify(False)

    def _keep_probing(self) -> None:
        while not self._ended.wait(self.seconds_to_probe):
            if self.is_open:
                self.probe()
            with self._lock:
                if not self.is_open:
                    self._prober = None
                    return

    def _log(self, problem: str, bug: Exception | None = None) -> None:
        now = self._clock()
        with self._lock:
            self._problem = problem
            is_quiet = now < self._logged.get(problem, float("-inf")) + _QUIET_SECONDS
            if not is_quiet:
                self._logged[problem], self._is_recovery_due = now, True
        if is_quiet:
            logger.debug("%s: %s", self.name, problem)
        else:
            level = logging.ERROR if bug else logging.WARNING
            logger.log(level, "%s: %s", self.name, problem, exc_info=bug)


class JointHealth(MediumHealth):
    """Combined health of several servers: open only if all their circuits are open."""

    def __init__(self, circuits: Callable[[], Iterable[Circuit]]) -> None:
        super().__init__()
        self._circuits = circuits

    @property
    def is_open(self) -> bool:
        """Are all circuits open?"""
        return all(circuit.is_open for circuit in self._circuits())

    @property
    def num_outages(self) -> int:
        """Sum over all servers; see Health."""
        return sum(circuit.num_outages for circuit in self._circuits())

    @property
    def problem(self) -> str:
        """Problem of the first server that has one, after the name of the server; see Health."""
        return next((f"{each.name}: {each.problem}" for each in self._circuits() if each.problem), "")
