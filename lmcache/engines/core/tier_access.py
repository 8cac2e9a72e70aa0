"""Access to one lower tier for an engine with a memory tier of its own: lookups, and jobs that copy rows.

The caller is the engine's scheduler thread. Only ``drain`` and ``close`` make it wait. Blocking calls run in
threads, on **buffers of their own**. Threads access the engine's rows only for copies in memory, and only
while the job runs. So a job ends at its deadline even if its threads are stuck, for example on a volume that
hangs. Whatever these threads do later, they change no row that the engine has reused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lmcache.common.threads import NICENESS
from lmcache.tiers.base import LowerTier, ObjectId, RowKey
from lmcache.tiers.errors import TierUnavailableError
from lmcache.tiers.tiered.tasks import Workers

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NUM_THREADS = 4  # for loads, and as many for stores
_MAX_SHARE = 4  # at most one in 4 rows may wait for a store: the engine can't reuse a row that waits
_POLL_SECONDS = 0.01


@dataclass
class _Job:
    job_id: int
    keys: Sequence[RowKey]
    rows: Sequence[int]
    is_store: bool
    deadline: float
    num_left: int
    """Keys whose load or store has not ended."""
    num_copying: int = 0
    is_over: bool = False
    """True if no more copies may begin."""
    done: list[int] = field(default_factory=list)
    """Positions of the keys whose load or store succeeded."""


class _Buffer(threading.local):
    """A buffer of one row's bytes per thread."""

    def __init__(self, num_bytes: int) -> None:
        self.row: Any = np.empty(num_bytes, np.uint8)


class TierAccess:
    """Looks up rows in ``tier``, and copies them between it and ``rows``, ``[num_rows, row_bytes]``.

    The tier stores each row as column 0 of its row key. A lookup is answered after at most
    ``lookup_seconds``. Every job ends once, after at most ``job_seconds`` plus the time of running copies. It
    may succeed for all of its keys, some or none.
    """

    def __init__(
        self, tier: LowerTier, rows: npt.NDArray[np.uint8], lookup_seconds: float, job_seconds: float
    ) -> None:
        self._tier = tier
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._num_rows, self._row_bytes = rows.shape
        self._lookup_seconds, self._job_seconds = lookup_seconds, job_seconds
        self._readers = Workers(_NUM_THREADS, "lmcache-tier-read")
        self._writers = Workers(_NUM_THREADS, "lmcache-tier-write", NICENESS)
        self._finders = Workers(1, "lmcache-tier-find")  # a thread of its own: no lookup waits for a copy
        self._buffer = _Buffer(self._row_bytes)
        self._is_stuck = False  # an operation missed its deadline, and no operation has ended since
        self._is_touching = False
        self._pending: dict[str, list[RowKey]] = {}  # keys to look up at the step's end, by request
        # By request and key: the answer, or the time of the question. Threads write only answers to pending
        # questions; the lock decides whether an answer or its deadline comes first.
        self._answers: dict[str, dict[RowKey, bool | float]] = {}
        self._lock = threading.Lock()  # protects jobs and the fields below; no copy holds it
        self._jobs: dict[int, _Job] = {}
        self._ended: list[tuple[int, list[int]]] = []
        self._num_storing = 0  # rows that wait for a store

    @property
    def is_available(self) -> bool:
        """True if the tier can be expected to answer."""
        return not (self._is_stuck or self._tier.health.is_open or self._rows is None)

    # ---- lookups: each key is looked up once per request ----

    def find(self, request_id: str, key: RowKey) -> bool | None:
        """Return True if the tier has the row; None: not known yet, ask again in the next step."""
        answers = self._answers.setdefault(request_id, {})
        answer = answers.get(key)
        if answer is None:
            if not self.is_available:
                return False
            answers[key] = time.monotonic()
            self._pending.setdefault(request_id, []).append(key)
        elif not isinstance(answer, bool) and time.monotonic() - answer > self._lookup_seconds:
            with self._lock:
                if not isinstance(answers[key], bool):  # otherwise the answer has just arrived
                    self._note_late()
                answer = answers[key] = answers[key] is True
        return answer if isinstance(answer, bool) else None

    def flush(self) -> None:
        """Start the lookups of this step, one batch per request. Call this at the step's end."""
        for request_id, keys in self._pending.items():
            self._finders.submit(partial(self._find, keys, self._answers.get(request_id, {})))
        self._pending = {}

    def note_absent(self, request_id: str, keys: Sequence[RowKey]) -> None:
        """Treat rows as missing, because their load failed. Otherwise the request could retry forever."""
        self._answers.get(request_id, {}).update(dict.fromkeys(keys, False))

    def forget(self, request_id: str) -> None:
        """Drop the answers for a request that has ended."""
        self._answers.pop(request_id, None)

    # ---- jobs ----

    def begin(self, job_id: int, keys: Sequence[RowKey], rows: Sequence[int], *, is_store: bool) -> None:
        """Begin to store the rows in the tier, or to load them from it.

        A store ends at once, without storing anything, if too many rows wait already. The engine can't reuse
        rows that wait.
        """
        job = _Job(job_id, keys, rows, is_store, time.monotonic() + self._job_seconds, len(keys))
        with self._lock:
            self._jobs[job_id] = job
            num_waiting, self._num_storing = self._num_storing, self._num_storing + len(rows) * is_store
            is_full = is_store and num_waiting and self._num_storing > self._num_rows // _MAX_SHARE
            if is_full or not keys or not self.is_available:
                self._end(job)
                return
        for position in range(len(keys)):
            (self._writers if is_store else self._readers).submit(partial(self._move, job, position))

    def touch(self, keys: Sequence[RowKey]) -> None:
        """Mark objects as recently used, in the background. Does nothing while an earlier call still runs."""
        if keys and not self._is_touching and self.is_available:
            self._is_touching = True
            self._writers.submit(partial(self._touch, keys))

    def take_ended(self) -> list[tuple[int, list[int]]]:
        """Return (job id, positions of the keys that succeeded) of jobs that ended since the last call."""
        with self._lock:
            self._end_late()
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until all jobs have ended."""
        while True:
            with self._lock:
                self._end_late()
                if not self._jobs:
                    return
            time.sleep(_POLL_SECONDS)

    def close(self, timeout_seconds: float | None) -> bool:
        """End all jobs, wait for running copies, and drop the reference to the rows.

        ``timeout_seconds``: longest wait for the threads; None: no limit. Returns False if a thread still
        uses the tier.
        """
        with self._lock:
            for job in self._jobs.values():
                job.deadline = float("-inf")
        pools = self._readers, self._writers, self._finders
        for pool in pools:
            pool.stop()
        self.drain()
        self._rows = None
        return all(pool.join(timeout_seconds) for pool in pools)

    def _end_late(self) -> None:
        """End jobs at their deadline. The caller must hold the lock."""
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            job.is_over = True
            self._note_late()
            if not job.num_copying:
                self._end(job)

    def _note_late(self) -> None:
        if not self._is_stuck:
            logger.warning("The lower tier missed a deadline: it is not used until a running operation ends")
        self._is_stuck = True

    def _end(self, job: _Job) -> None:
        """End a job, once. The caller must hold the lock."""
        job.is_over = True
        if self._jobs.pop(job.job_id, None) is not None:
            self._num_storing -= len(job.rows) * job.is_store
            self._ended.append((job.job_id, sorted(job.done)))

    # ---- threads ----

    def _find(self, keys: Sequence[RowKey], answers: dict[RowKey, bool | float]) -> None:
        ids = [ObjectId(key, 0) for key in keys]
        results = self._attempt(lambda: self._tier.find_each(ids), [False] * len(keys))
        with self._lock:
            self._is_stuck = False
            for key, is_here in zip(keys, results, strict=True):
                if not isinstance(answers.get(key), bool):
                    answers[key] = is_here

    def _touch(self, keys: Sequence[RowKey]) -> None:
        self._attempt(lambda: self._tier.touch(keys, 1), None)
        self._is_touching = False

    def _move(self, job: _Job, position: int) -> None:
        is_done = not job.is_over and self._attempt(partial(self._move_bytes, job, position), False)
        with self._lock:
            self._is_stuck = False
            job.num_left -= 1
            if is_done and not job.is_over:
                job.done.append(position)
            if not job.num_left:
                self._end(job)

    def _move_bytes(self, job: _Job, position: int) -> bool:
        object_id, buffer = ObjectId(job.keys[position], 0), memoryview(self._buffer.row)
        if job.is_store:
            return self._copy(job, position) and self._tier.store(object_id, buffer)
        return self._tier.load(object_id, buffer, len(buffer)) is not None and self._copy(job, position)

    def _copy(self, job: _Job, position: int) -> bool:
        """Copy between a row and this thread's buffer. Returns False if the job is over."""
        with self._lock:
            if job.is_over or self._rows is None:
                return False
            row, buffer = self._rows[job.rows[position]], self._buffer.row
            job.num_copying += 1
        np.copyto(*((buffer, row) if job.is_store else (row, buffer)))
        del row  # a job that has ended must not refer to the engine's memory
        with self._lock:
            job.num_copying -= 1
        return True

    def _attempt(self, operation: Callable[[], T], neutral: T) -> T:
        """Return the operation's result, or ``neutral`` if it fails. The circuit logs an unavailable tier."""
        try:
            return operation()
        except TierUnavailableError:
            return neutral
        except Exception:
            logger.exception("An operation of the lower tier failed: it counts as a miss, or as not stored")
            return neutral
        finally:
            self._is_stuck = False
