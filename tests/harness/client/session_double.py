"""A sidecar inside the test: the parts of ``SidecarSession`` that the connector uses, with faults."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from lmcache_client.rpc.errors import SidecarUnavailableError
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import BlockCopy, StoreCopier
from lmcache_client.rpc.times import RequestTimes
from lmcache_store.hints import HintDecision, HintOutcome, Hints
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Found, Located, LookupResult, Reservation, Reserved, Slot
from tests.harness.sidecar.wire import NAMESPACE


class AppliedHints(NamedTuple):
    """One call of ``apply_hints``."""

    request_id: str
    num_keys: list[tuple[int, int]]  # of each KV group
    tenant: bytes
    hints: Hints
    answer_id: str


class SessionDouble:
    """Rows are allocated in order and never evicted. ``committed`` and ``aborted`` list their outcome."""

    def __init__(self) -> None:
        self.epoch = 1
        self.slots: Any = np.zeros((64, 4096), np.uint8)
        self.rows: dict[bytes, Slot] = {}
        self.committed: list[Slot] = []
        self.aborted: list[Slot] = []
        self.tenants: set[bytes] = set()  # of all reservations
        self.leased: set[str] = set()
        self.owed: list[str] = []
        self.num_pending = 0
        self.is_probing = False
        self.num_hints = 0
        self.num_handed_over = 0  # of the last lookup
        self.private_reason = ""  # of the last lookup
        self.scheduled: list[tuple[str, int, Scheduled]] = []  # id, number of keys, report
        self.times: list[RequestTimes] = []
        self.applied: list[AppliedHints] = []
        self.hints_error: Exception | None = None
        self.marks = b""  # of documents, from all calls
        self.memory_only = False
        self.is_down = False
        self.is_copying = 0  # blocks of several threads
        self.before_lookup: Callable[[], None] = lambda: None
        self.store_copier = StoreCopier(False, "KV in host memory")
        self.copy_blocks: Callable[[Sequence[BlockCopy]], list[bool]]
        self._next_row = 0

    @property
    def session(self) -> SessionDouble:
        return self

    def release_later(self, request_id: str) -> None:
        self.owed.append(request_id)

    def close(self) -> None:
        pass

    @property
    def index(self) -> SessionDouble:
        return self

    def find(self, row_keys: Any) -> Found:
        """Like ``MappedIndex.find``."""
        slots = self._leading(_split(row_keys.tobytes()))
        rows, generations = [slot.row for slot in slots], [slot.generation for slot in slots]
        return Found(np.array(rows, np.int64), np.array(generations, np.uint64))

    def find_few(self, keys: Iterable[bytes]) -> list[Slot]:
        """Like ``MappedIndex.find_few``."""
        return self._leading(_split(b"".join(keys)))

    def find_each(self, row_keys: Any) -> Located:
        """Like ``MappedIndex.find_each``: the place of an absent row is that of another one."""
        slots = [self.rows.get(key) for key in _split(row_keys.tobytes())]
        is_there = [slot in self.committed for slot in slots]
        other = self.committed[0] if self.committed else Slot(0, 0)
        places = [slot if slot in self.committed else other for slot in slots]
        rows = np.array([slot.row for slot in places], np.int64)
        generations = np.array([slot.generation for slot in places], np.uint64)
        return Located(np.array(is_there, np.bool_), rows, generations)

    def view(self, row: int, num_bytes: int) -> Any:
        """Like ``SidecarSession.view``, with one slot for each row."""
        return self.slots[row][:num_bytes]

    def lookup(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        *,
        hint: bool = False,
        scheduled: Scheduled | None = None,
        num_handed_over: int = 0,
        private_reason: str = "",
        **_: Any,
    ) -> LookupResult:
        self.before_lookup()
        self.private_reason = private_reason
        self.num_handed_over = num_handed_over
        self._check_up()
        if scheduled is not None:
            self.scheduled.append((request_id, len(group_keys[0][1]) // ROW_KEY_BYTES, scheduled))
        number = min(len(self._leading(_split(keys))) for _, keys in group_keys)
        self.num_hints += hint
        if not hint:
            self.leased.add(request_id)
        return LookupResult(number, 0 if hint else number, self.num_pending, self.is_probing)

    def _leading(self, keys: Iterable[bytes]) -> list[Slot]:
        slots = itertools.takewhile(lambda slot: slot in self.committed, map(self.rows.get, keys))
        return [slot for slot in slots if slot is not None]

    def reserve(self, group: int, keys: bytes, *, tenant: bytes = b"", **_: Any) -> list[Reservation]:
        self._check_up()
        self.tenants.add(tenant)
        return list(map(self._reserve, _split(keys)))

    def commit(self, slots: Sequence[Slot], timeout: float = 0) -> None:
        assert self.is_copying, "commit must be called inside the copying block"
        self._check_up()
        self.committed += slots

    def abort(self, slots: Sequence[Slot], timeout: float = 0) -> None:
        self._check_up()
        self.aborted += slots

    def release(
        self, request_ids: Sequence[str], timeout: float = 0, times: Sequence[RequestTimes] = ()
    ) -> None:
        self._check_up()
        self.leased -= set(request_ids)
        self.times += times

    def holds(self, slot: Slot) -> bool:
        return slot in self.committed

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.is_copying += 1
        try:
            yield
        finally:
            self.is_copying -= 1

    def _reserve(self, key: bytes) -> Reservation:
        if key in self.rows:
            return Reservation(Reserved.EXISTS if self.rows[key] in self.committed else Reserved.BUSY)
        self.rows[key] = slot = Slot(self._next_row, 1)
        self._next_row += 1
        return Reservation(Reserved.SLOT, slot)

    def apply_hints(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        tenant: bytes,
        hints: Hints,
        answer_id: str = "",
    ) -> list[HintDecision]:
        """Accept all actions."""
        self._check_up()
        if self.hints_error is not None:
            raise self.hints_error
        num_keys = [(group, len(keys) // ROW_KEY_BYTES) for group, keys in group_keys]
        self.applied.append(AppliedHints(request_id, num_keys, tenant, hints, answer_id))
        return [HintDecision(action.action_id, HintOutcome.ACCEPTED) for action in hints.actions]

    def share_marks(self, marks: bytes, since: int, timeout: float | None = None) -> Any:
        """Take the marks. No other engine shares any."""
        self._check_up()
        self.marks += marks
        return SimpleNamespace(marks=b"", since=since)

    def _check_up(self) -> None:
        if self.is_down:
            raise SidecarUnavailableError("down")


def _split(keys: bytes) -> list[bytes]:
    """Row keys, with those of the Hello's namespace shortened to their chunk keys."""
    row_keys = (keys[start : start + ROW_KEY_BYTES] for start in range(0, len(keys), ROW_KEY_BYTES))
    return [key.removeprefix(NAMESPACE) for key in row_keys]
