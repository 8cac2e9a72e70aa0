"""One lower tier for an engine that keeps its own memory tier: what is there, and jobs between its rows and
the tier's objects.

The caller is a scheduler's thread, and is never kept waiting but by ``drain`` and ``close``. What blocks runs
in threads, on **buffers of their own**: the engine's rows are touched by copies in memory alone, and only
while their job is under way. So a job whose time is over ends whatever its threads are stuck in (a volume
that hangs), and what they do later reaches no row that means something else by then.
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

from lmcache.tiers.base import LowerTier, ObjectId, RowKey
from lmcache.tiers.errors import TierUnavailableError
from lmcache.tiers.tiered.tasks import NICENESS, Workers

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NUM_THREADS = 4  # for loads, and as many for stores
_MAX_SHARE = 4  # one in so many rows may wait for being stored: until then the engine can't use it otherwise
_POLL_SECONDS = 0.01


@dataclass
class _Job:
    job_id: int
    keys: Sequence[RowKey]
    rows: Sequence[int]
    is_store: bool
    deadline: float
    num_left: int
    """Keys that were not tried yet."""
    num_copying: int = 0
    is_over: bool = False
    """No copy begins any more."""
    done: list[int] = field(default_factory=list)


class _Buffer(threading.local):
    """One row's bytes for each thread."""

    def __init__(self, num_bytes: int) -> None:
        self.row: Any = np.empty(num_bytes, np.uint8)


class TierAccess:
    """Lookups in ``tier``, loads and stores between it and ``rows`` (``[rows, bytes]``): each row is column 0
    of its row key.

    A lookup is answered after at most ``lookup_seconds``. Every job that was begun ends once, after at most
    ``job_seconds`` and the copies that are under way then: in full, in part, or not at all.
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
        self._finders = Workers(1, "lmcache-tier-find")  # no lookup waits for bytes
        self._buffer = _Buffer(self._row_bytes)
        self._is_stuck = False  # something was not done in time, and nothing was done since
        self._is_touching = False
        self._unasked: dict[str, list[RowKey]] = {}
        # By request and key: the answer, or when it was asked for. Threads write what they were asked only,
        # and each is given up, or not, under the lock.
        self._answers: dict[str, dict[RowKey, bool | float]] = {}
        self._lock = threading.Lock()  # protects jobs and what follows; held by no copy
        self._jobs: dict[int, _Job] = {}
        self._ended: list[tuple[int, list[int]]] = []
        self._num_storing = 0  # rows

    @property
    def is_available(self) -> bool:
        """Is it of any use to ask the tier?"""
        return not (self._is_stuck or self._tier.health.is_open or self._rows is None)

    # ---- lookups: each key is asked for once per request ----

    def find(self, request_id: str, key: RowKey) -> bool | None:
        """Say whether the tier has it; None: not known yet, ask again in the next step."""
        answers = self._answers.setdefault(request_id, {})
        answer = answers.get(key)
        if answer is None:
            if not self.is_available:
                return False
            answers[key] = time.monotonic()
            self._unasked.setdefault(request_id, []).append(key)
        elif not isinstance(answer, bool) and time.monotonic() - answer > self._lookup_seconds:
            with self._lock:
                if not isinstance(answers[key], bool):  # else it came just now
                    self._note_late()
                answer = answers[key] = answers[key] is True
        return answer if isinstance(answer, bool) else None

    def flush(self) -> None:
        """At a step's end: look for what was asked for in it, one batch per request."""
        for request_id, keys in self._unasked.items():
            self._finders.submit(partial(self._find, keys, self._answers.get(request_id, {})))
        self._unasked = {}

    def note_absent(self, request_id: str, keys: Sequence[RowKey]) -> None:
        """They could not be loaded: were they offered again, the request would never end."""
        self._answers.get(request_id, {}).update(dict.fromkeys(keys, False))

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._answers.pop(request_id, None)

    # ---- jobs ----

    def begin(self, job_id: int, keys: Sequence[RowKey], rows: Sequence[int], *, is_store: bool) -> None:
        """Begin to write rows, or to fill them. A store ends at once when too many rows wait already: the
        engine's memory is not kept from it longer than it can spare it."""
        job = _Job(job_id, keys, rows, is_store, time.monotonic() + self._job_seconds, len(keys))
        with self._lock:
            self._jobs[job_id] = job
            num_others, self._num_storing = self._num_storing, self._num_storing + len(rows) * is_store
            is_full = is_store and num_others and self._num_storing > self._num_rows // _MAX_SHARE
            if is_full or not keys or not self.is_available:
                self._end(job)
                return
        for position in range(len(keys)):
            (self._writers if is_store else self._readers).submit(partial(self._move, job, position))

    def touch(self, keys: Sequence[RowKey]) -> None:
        """Mark objects as used that were hit elsewhere, some time; not while others are being marked."""
        if keys and not self._is_touching and self.is_available:
            self._is_touching = True
            self._writers.submit(partial(self._touch, keys))

    def take_ended(self) -> list[tuple[int, list[int]]]:
        """Return the jobs that ended since the last call: the positions of the keys whose bytes are where
        they should be."""
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
        """End all jobs, wait for the copies under way, and forget the rows. True: no thread uses the tier
        any more; False: after ``timeout_seconds`` one still does. None: wait until all have ended."""
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
        """Under the lock."""
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            job.is_over = True
            self._note_late()
            if not job.num_copying:
                self._end(job)

    def _note_late(self) -> None:
        if not self._is_stuck:
            logger.warning("the lower tier was too slow: it is not asked until it has done what is under way")
        self._is_stuck = True

    def _end(self, job: _Job) -> None:
        """Under the lock."""
        job.is_over = True
        if self._jobs.pop(job.job_id, None) is not None:
            self._num_storing -= len(job.rows) * job.is_store
            self._ended.append((job.job_id, sorted(job.done)))

    # ---- threads ----

    def _find(self, keys: Sequence[RowKey], answers: dict[RowKey, bool | float]) -> None:
        ids = [ObjectId(key, 0) for key in keys]
        found = self._attempt(lambda: self._tier.find_each(ids), [False] * len(keys))
        with self._lock:
            self._is_stuck = False
            for key, is_here in zip(keys, found, strict=True):
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
        """Between a row and this thread's buffer. False: the job is over, the row may be somebody else's."""
        with self._lock:
            if job.is_over or self._rows is None:
                return False
            row, buffer = self._rows[job.rows[position]], self._buffer.row
            job.num_copying += 1
        np.copyto(*((buffer, row) if job.is_store else (row, buffer)))
        del row  # no reference to the engine's memory is left when the copy has ended
        with self._lock:
            job.num_copying -= 1
        return True

    def _attempt(self, operation: Callable[[], T], neutral: T) -> T:
        """A tier that is unavailable has nothing; its circuit has said so."""
        try:
            return operation()
        except TierUnavailableError:
            return neutral
        except Exception:
            logger.exception("a lower tier failed")
            return neutral
        finally:
            self._is_stuck = False
