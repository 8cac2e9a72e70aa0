"""The tiered store: the asyncio side that joins the memory tier with the remote tier below it.

One event loop owns everything here and in the memory tier. What blocks (the remote tier) or takes long
(checksums) runs in worker threads that see only byte views and keys; rows are pinned or reserved while a
thread works on them.

::

    commit -> visible -> checksum (a thread) -> slot table -> write queue -> remote tier (a thread)
    lookup -> miss -> probe (a thread) -> promotion: reserve, load, verify (a thread), commit -> next lookup
    hits

A lookup never waits for any of it: it says what is there, and what is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmcache.tiers.base import Arena, Lookup, Reservation, RowKey, Slot, TierUnavailable, split_row_key
from lmcache.tiers.header import checksum
from lmcache.tiers.memory import LeaseId, MemoryTier
from lmcache.tiers.remote import RemoteTier
from lmcache.tiers.stats import TieredStats
from lmcache.tiers.writes import WriteQueue

T = TypeVar("T")

__all__ = ["Lookup", "TieredStats", "TieredStore"]

_log = logging.getLogger(__name__)

_NUM_READERS = 2
_NUM_WRITERS = 2
_ABSENT_SECONDS = 1.0
"""How long a key stays known as absent below: repeated lookups of one request must not probe again and
again."""


class TieredStore:
    """Made on the running loop, once per format of the arena. Nothing here blocks the loop.

    Use: ``await store.adopt()`` first; ``await store.close()`` before the arena is formatted anew or closed.
    Quarantine, leases' ends and ``usable_rows`` are the business of ``store.memory``.
    """

    def __init__(
        self, arena: Arena, remote: RemoteTier | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory = MemoryTier(arena, clock=clock)
        self.stats = TieredStats()
        self._arena = arena
        self._table = arena.table
        self._remote = remote
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._labels: dict[bytes, bytes] = {}  # of shared namespaces
        self._pending: set[RowKey] = set()  # being promoted or verified, or waiting for it
        self._probing: set[RowKey] = set()  # first keys of probes under way
        self._absent: OrderedDict[RowKey, float] = OrderedDict()  # known as absent below until then
        self._promoting = asyncio.Semaphore(_NUM_READERS)
        self._queue = WriteQueue(arena.num_rows // 4)
        self._has_writes = asyncio.Event()
        self._num_unsettled = 0  # visible rows of which it is open whether they are written through
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self._remote_is_well = asyncio.Event()
        self._remote_is_well.set()
        self._hashers = ThreadPoolExecutor(1, "checksum")
        # One more than there are promotions, so that a probe never queues behind bytes.
        self._readers = ThreadPoolExecutor(_NUM_READERS + 1, "read")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, "write")
        self._tasks: set[asyncio.Task[None]] = set()
        if remote is not None:
            for _ in range(_NUM_WRITERS):
                self._spawn(self._keep_writing())

    async def adopt(self) -> None:
        """Rebuild the index from the slot table, letting the loop run in between."""
        for _ in self.memory.adopt():
            await asyncio.sleep(0)

    def register(self, namespace: bytes, *, label: bytes = b"", private: bool = False) -> None:
        """Say what a namespace is. Rows of private or unknown namespaces never leave the memory tier.

        ``label`` (at most 512 bytes) goes with every stored object, for people who look at them.
        """
        if private:
            self._labels.pop(namespace, None)
        else:
            self._labels[namespace] = label

    # ---- load ----

    def lookup(self, lease_id: LeaseId, groups: Sequence[Sequence[RowKey]]) -> Lookup:
        """Lease what is in memory, and start bringing what the remote tier holds; repeat to see how it goes
        on.

        ``groups``: the keys of the same chunks in every KV group, head first.
        """
        chain = [key for chunk in zip(*groups, strict=True) for key in chunk]
        num_resident, slots = self.memory.lookup(lease_id, chain)
        num_coming, probing = self._bring(chain[num_resident:], lease_id[1])
        # Whole chunks: the last one may lie partly in memory and partly be on its way.
        width = max(1, len(groups))
        num_chunks = num_resident // width
        num_pending = (num_resident + num_coming) // width - num_chunks
        leased = slots[: len(slots) // width * width]
        return Lookup(
            num_chunks, num_pending, probing, [leased[group::width] for group in range(len(groups))]
        )

    def _bring(self, keys: Sequence[RowKey], request: str) -> tuple[int, bool]:
        """Return how many leading keys are here or on their way, and whether the remote tier is being
        asked."""
        to_verify = []
        num_coming = 0
        for key in keys:
            if key not in self._pending:
                slot = self.memory.unverified(key)
                if slot is not None:
                    to_verify.append((key, slot))
                elif not self.memory.is_resident(key):
                    break
            num_coming += 1
        if to_verify:
            self._pending.update(key for key, _ in to_verify)
            self._spawn(self._verify(to_verify))
        return num_coming, self._probe(keys[num_coming:], request)

    def _probe(self, keys: Sequence[RowKey], request: str) -> bool:
        """Ask the remote tier about these keys, unless that is under way, or of no use."""
        if not keys or not self.is_remote_well or not self._is_shared(keys[0]):
            return False
        if keys[0] in self._probing:
            return True
        room = self.memory.usable_rows // 4 - len(self._pending)
        if room <= 0 or self._absent.get(keys[0], 0.0) > self._clock():
            return False
        self._probing.add(keys[0])
        self._spawn(self._probe_below(keys[:room], request))
        return True

    async def _probe_below(self, keys: Sequence[RowKey], request: str) -> None:
        num_present = 0
        num_columns = self._table.num_columns
        try:
            with contextlib.suppress(TierUnavailable):
                num_present = await self._ask(self._readers, lambda remote: remote.probe(keys, num_columns))
        finally:
            self._probing.discard(keys[0])
        for key in keys[:num_present]:
            if key not in self._pending:
                self._pending.add(key)
                self._spawn(self._promote(key, request))
        for key in keys[num_present : num_present + 1]:
            self._note_absent(key)

    async def _promote(self, key: RowKey, request: str) -> None:
        is_here = False
        try:
            async with self._promoting:
                if not self.is_remote_well:  # by now: then nothing is known of the key
                    return
                with contextlib.suppress(TierUnavailable):
                    is_here = await self._load(key, request)
        finally:
            self._pending.discard(key)
        self.stats.promoted += is_here
        self.stats.promotions_failed += not is_here
        if not is_here:
            self._note_absent(key)

    async def _load(self, key: RowKey, request: str) -> bool:
        """Bring all columns of a row from the remote tier, or nothing."""
        slot = self.memory.reserve_row(key, request)
        if slot is None:
            return False
        views = [self._arena.view(slot.row, column) for column in range(self._table.num_columns)]
        loaded = None
        try:
            loaded = await self._ask(self._readers, lambda remote: _load_columns(remote, key, views))
        finally:
            if loaded is None:
                self.memory.abort_row(slot)
            else:
                self.memory.commit_row(slot, *loaded)
        return loaded is not None

    async def _verify(self, rows: Sequence[tuple[RowKey, Slot]]) -> None:
        """Compare rows from before a restart with their checksums."""
        for key, slot in rows:
            if self.memory.pin(slot) is not None:
                try:
                    found = await self._checksums(slot)
                    noted = [self._table.checksum(slot.row, column) for column in range(len(found))]
                    self.memory.verified(slot, is_intact=found == noted)
                    self.stats.verified += found == noted
                finally:
                    self.memory.unpin(slot)
            self._pending.discard(key)

    def _note_absent(self, key: RowKey) -> None:
        now = self._clock()
        self._absent[key] = now + _ABSENT_SECONDS
        self._absent.move_to_end(key)
        while next(iter(self._absent.values())) <= now:
            self._absent.popitem(last=False)

    # ---- store ----

    def reserve(
        self,
        keys: Sequence[RowKey],
        column: int,
        owner: bytes,
        *,
        length: int,
        first_chunk: int = 0,
        request: str = "",
    ) -> list[Reservation]:
        """One answer per key, the head of the chain first; ``length``: payload bytes of one column.

        What is stored for one ``request``, in however many calls, is evicted tail first.
        """
        group = request or object()
        return [
            self.memory.reserve(key, column, owner, length=length, depth=depth, request=group)
            for depth, key in enumerate(keys, first_chunk)
        ]

    def commit(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Commit all or, raising StaleSlot, none. What becomes visible is checksummed and written through."""
        visible = self.memory.commit(slots, column, owner)
        if visible:
            self._num_unsettled += len(visible)
            self._is_drained.clear()
            for slot in visible:
                self.memory.pin(slot)
            self._spawn(self._seal(visible))

    def abort(self, slots: Sequence[Slot], column: int, owner: bytes) -> None:
        """Abort all or, raising StaleSlot, none."""
        self.memory.abort(slots, column, owner)

    async def _seal(self, slots: Sequence[Slot]) -> None:
        """Checksum rows, so that they outlive a restart, and queue them for writing."""
        for slot in slots:
            try:
                for column, value in enumerate(await self._checksums(slot)):
                    self._table.seal(slot.row, column, value)
            finally:
                self.memory.unpin(slot)
            key, depth = self.memory.describe(slot)
            if self._is_shared(key):
                self._queue_write(slot, depth)
            else:
                self._settle_write()

    def _queue_write(self, slot: Slot, depth: int, *, is_first: bool = False) -> None:
        if self._queue.push(slot, depth, is_first=is_first) is not None:
            self.stats.write_dropped += 1
            self._settle_write()
        self._has_writes.set()

    async def _keep_writing(self) -> None:
        while True:
            await self._has_writes.wait()
            await self._remote_is_well.wait()
            item = self._queue.pop()
            if item is None:
                self._has_writes.clear()
                continue
            slot, depth = item
            try:
                await self._write(slot)
            except TierUnavailable:
                self._queue_write(slot, depth, is_first=True)
                continue
            except Exception:
                _log.exception("a row could not be written through")
                self.stats.write_dropped += 1
            self._settle_write()

    async def _write(self, slot: Slot) -> None:
        key = self.memory.pin(slot)
        if key is None:
            self.stats.write_evicted += 1
            return
        label = self._labels.get(split_row_key(key)[0], b"")
        payloads = self._payloads(slot)

        def store(remote: RemoteTier) -> bool:
            return all(remote.store(key, column, payload, label) for column, payload in enumerate(payloads))

        try:
            is_stored = await self._ask(self._writers, store)
        finally:
            self.memory.unpin(slot)
        self.stats.written += is_stored
        self.stats.write_refused += not is_stored

    def _settle_write(self) -> None:
        """A row is written through, or never will be."""
        self._num_unsettled -= 1
        if self._num_unsettled == 0:
            self._is_drained.set()

    # ---- life ----

    @property
    def num_unsettled(self) -> int:
        """Rows whose checksum, or write to the remote tier, is still to come."""
        return self._num_unsettled

    @property
    def is_remote_well(self) -> bool:
        """Is there a remote tier, and does it answer as far as is known?"""
        return self._remote is not None and self._remote_is_well.is_set()

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until all rows committed so far are written through; False when time ran out."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_drained.wait(), timeout_seconds)
        return self._is_drained.is_set()

    async def close(self) -> None:
        """Stop all work; when this returns no thread touches the arena any more."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (self._hashers, self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        if self._remote is not None:
            self._remote.close()

    async def _ask(self, pool: ThreadPoolExecutor, operation: Callable[[RemoteTier], T]) -> T:
        """Run an operation in a thread. Raises TierUnavailable: then nothing more is asked until a trial
        succeeds."""
        assert self._remote is not None
        try:
            return await self._loop.run_in_executor(pool, operation, self._remote)
        except TierUnavailable:
            if self._remote_is_well.is_set():
                self._remote_is_well.clear()
                self._spawn(self._recover(self._remote))
            raise

    async def _recover(self, remote: RemoteTier) -> None:
        """Try a sick remote tier in the background, so that no lookup ever has to."""
        while remote.breaker.is_open:
            await asyncio.sleep(remote.breaker.seconds_to_trial)
            await self._loop.run_in_executor(self._readers, remote.try_again)
        self._remote_is_well.set()

    def _is_shared(self, key: RowKey) -> bool:
        return self._remote is not None and split_row_key(key)[0] in self._labels

    def _payloads(self, slot: Slot) -> list[memoryview]:
        return [
            self._arena.view(slot.row, column)[: self._table.length(slot.row, column)]
            for column in range(self._table.num_columns)
        ]

    async def _checksums(self, slot: Slot) -> list[bytes]:
        payloads = self._payloads(slot)
        return await self._loop.run_in_executor(self._hashers, lambda: [checksum(view) for view in payloads])

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("background work ended with an error", exc_info=task.exception())


def _load_columns(
    remote: RemoteTier, key: RowKey, views: Sequence[memoryview]
) -> tuple[list[int], list[bytes]] | None:
    """In a reader thread: lengths and checksums of all columns, or nothing."""
    lengths = []
    for column, view in enumerate(views):
        length = remote.load(key, column, view)
        if length is None:
            return None
        lengths.append(length)
    return lengths, [checksum(view[:length]) for view, length in zip(views, lengths, strict=True)]
