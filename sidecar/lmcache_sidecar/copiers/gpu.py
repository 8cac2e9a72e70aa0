"""One GPU: who wants copies from it, its reader, and what is under way there. One event loop owns it.

**Under way** is a copy from the moment it is sent to the reader until the reader says that it ended, or the
reader's process is reaped. Nothing else proves it: neither a time-out nor a lost client. Jobs end, and their
slots may be used again, when nothing of theirs is queued or under way.

The reader is replaced when its process id is that of a new engine's process, and when it ends by a fault:
whose copies were under way, or whose memory was being opened, copies for itself from then on; who had no part
in it goes on with the next reader.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lmcache.cuda.pin_status import PinStatus
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.stats import count_reason
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.fair_queue import FairQueue
from lmcache_sidecar.copiers.jobs import CopyStats, Job, SlotCopy
from lmcache_sidecar.copiers.messages import Kind
from lmcache_sidecar.copiers.process import Reader

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Until the reader has a context: a driver may have to be loaded first."""

OPEN_SECONDS = 30.0
COPY_SECONDS = 5.0
"""A batch takes a few ms."""

CLOSE_SECONDS = 1.5
"""A restarted engine waits for its memory: with the last chance that a reader has, 2 s."""

_SAME_PID = "its reader's process id is an engine's, too"
_PINNED = "it had memory pinned that is given back"

_MAX_BATCHES = 2
"""Under way at once: one is copied while the next one is made."""

_BATCH_COST = 64 << 20
_PAGE_COST = 512
"""Bytes that could be copied in the time that one more piece costs."""

_MAX_MOVES = 3
"""To another reader, after faults that were not the client's: a GPU that keeps failing is left alone."""


class _Item(NamedTuple):
    job: Job
    position: int
    """Among the job's slots."""
    member: int
    copy: SlotCopy
    num_bytes: int
    cost: int


@dataclass(eq=False)
class Member:
    """A client whose KV lies on the GPU. ``number`` never comes back."""

    number: int
    pid: int
    column_offset: int
    offer: pb.TransferOffer
    on_turn: Callable[[bool, str], None]
    """Told whether the sidecar copies its stores now, and why (not)."""

    is_asked: bool = False
    """OPEN was sent to the present reader."""

    is_open: bool = False
    num_moves: int = 0
    row_costs: dict[int, tuple[int, int]] = field(init=False)
    """Bytes and pages of a row, by KV group."""

    def __post_init__(self) -> None:
        self.row_costs = {
            pages.group: (
                pages.blocks_per_row * sum(layer.page_bytes for layer in pages.layers),
                pages.blocks_per_row * len(pages.layers),
            )
            for pages in self.offer.groups
        }

    @property
    def handles(self) -> set[bytes]:
        """Of its memory."""
        return {allocation.ipc_handle for allocation in self.offer.allocations}


class Gpu:
    """See the module."""

    def __init__(self, uuid: str, arena: ArenaFile, stats: CopyStats) -> None:
        self.uuid = uuid
        self.pins = PinStatus()
        """How much of the arena the reader has pinned."""
        self._arena, self._stats = arena, stats
        self._members: dict[int, Member] = {}
        self._queue: FairQueue[_Item] = FairQueue()
        self._batches: dict[int, list[_Item]] = {}  # under way
        self._closing: set[int] = set()  # members that left and are still open in the reader
        self._batch_numbers = itertools.count(1)
        self._reader: Reader | None = None
        self._has_started = False  # the reader has
        self._is_retiring = False  # the reader gets no more work
        self._pinned_rows = 0  # that the reader was told to be ready
        self._task: asyncio.Task[None] | None = None

    @property
    def num_slots_under_way(self) -> int:
        """Slots that a reader may be writing to."""
        return sum(map(len, self._batches.values()))

    @property
    def is_idle(self) -> bool:
        """Is there no client, and no reader any more?"""
        return self._task is None

    # ---- clients ----

    def add(self, member: Member) -> None:
        """Begin to copy for it, as soon as its memory is open."""
        for other in list(self._members.values()):
            if other.handles & member.handles:  # of a dead process: the driver gave its address away again
                self._turn_off(other, "another process offers the same GPU memory")
        self._members[member.number] = member
        member.on_turn(False, "the reader of its GPU is starting")
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._reader is not None and self._reader.pid == member.pid:
            self._retire(_SAME_PID)
        self._open_waiting()

    def remove(self, number: int) -> None:
        """The client left: nothing of its memory stays open."""
        member = self._members.pop(number, None)
        if member is None:
            return
        self._drop(number, "the client has left")
        if member.is_asked and self._reader is not None:
            self._closing.add(number)
            self._reader.ask(Kind.CLOSE, number, b"", Kind.CLOSED, CLOSE_SECONDS)
        self._check_end()

    def grow(self) -> None:
        """More rows of the arena are populated; of fewer a reader is told nothing: it may be copying."""
        ready_rows = self._arena.ready_rows
        if self._reader is not None and self._has_started and ready_rows > self._pinned_rows:
            self._pinned_rows = ready_rows
            self._reader.tell(Kind.GROWN, ready_rows)

    def let_go(self) -> bool:
        """End the reader if it has rows pinned that are not ready any more; True: none has."""
        if self._pinned_rows <= self._arena.ready_rows:
            return True
        if not self._is_retiring:
            self._retire(_PINNED)
        return False

    async def close(self) -> None:
        """End the reader; waits until it is no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ---- copies ----

    def begin(self, number: int, copies: Sequence[SlotCopy]) -> Job:
        """Fill slots for an open member."""
        member = self._members[number]
        job = Job(len(copies), [False] * len(copies), asyncio.get_running_loop().create_future())
        items = []
        for position, copy in enumerate(copies):
            num_bytes, num_pages = member.row_costs[copy.group]
            items.append(_Item(job, position, number, copy, num_bytes, num_bytes + num_pages * _PAGE_COST))
        self._queue.put(number, items)
        self._pump()
        return job

    def drop(self, number: int, job: Job) -> None:
        """Nobody waits for the job any more: what of it is not under way yet is not copied."""
        self._drop(number, "nobody waits any more", job)

    def _drop(self, number: int, reason: str, job: Job | None = None) -> None:
        for item in self._queue.drop(number, lambda item: job is None or item.job is job):
            item.job.refusal = item.job.refusal or reason
            item.job.note_end(item.position, is_copied=False)

    def _pump(self) -> None:
        """Send batches as long as few are under way."""
        if (reader := self._working_reader) is None:
            return
        while self._queue and len(self._batches) < _MAX_BATCHES:
            number = next(self._batch_numbers)
            items = self._batches[number] = self._queue.take(_BATCH_COST, lambda item: item.cost)
            body = messages.pack_copies(_grouped(items))
            reader.ask(Kind.COPY, number, body, Kind.COPIED, COPY_SECONDS)
            self._stats.copy_batches += 1

    def _end_batch(self, number: int, refusal: str = "") -> None:
        for item in self._batches.pop(number, ()):
            if refusal:
                self._stats.failed_slots += 1
                item.job.refusal = item.job.refusal or refusal
            else:
                self._stats.copied_slots += 1
                self._stats.copied_bytes += item.num_bytes
            item.job.note_end(item.position, is_copied=not refusal)

    # ---- the reader ----

    async def _run(self) -> None:
        """One reader after the other, while anybody needs one."""
        try:
            while self._members:
                await self._run_reader()
        finally:
            self._task = None

    async def _run_reader(self) -> None:
        reason = "the sidecar is stopping"
        try:
            self._reader = await Reader.start(self.uuid, self._arena.fileno(), self._pids)
            self._stats.started_readers += 1
            await self._serve(self._reader)
        except OSError as error:
            reason = f"its reader can't be started: {error}"
        except Exception as error:  # whatever it is, engines copy for themselves then
            logger.exception("Reading %s failed", self.uuid)
            reason = repr(error)
        finally:
            if self._reader is not None:
                reason = await self._reader.reap()
            self._reader_ended(reason)

    def _pids(self) -> set[int]:
        return {member.pid for member in self._members.values()}

    async def _serve(self, reader: Reader) -> None:
        """From START to its end."""
        geometry = self._arena.geometry
        assert geometry is not None, "clients are attached"
        arena_format = messages.Format(geometry.slot_bytes, self._arena.num_rows, self._arena.ready_rows)
        self._pinned_rows = arena_format.ready_rows
        start = messages.pack_start(self.uuid, arena_format)
        reader.ask(Kind.START, 0, start, Kind.STARTED, START_SECONDS)
        while (message := await reader.receive()) is not None:
            kind, number, reason = message
            if kind == Kind.STARTED:
                logger.info("Reader %d reads %s", reader.pid, self.uuid)
                self._has_started = True
                self.grow()
                self._open_waiting()
            elif kind == Kind.OPENED:
                self._opened(number, reason)
            elif kind == Kind.COPIED:
                self._end_batch(number)
            elif kind == Kind.CLOSED:
                self._closing.discard(number)
            elif kind == Kind.PINNED:
                self.pins = messages.parse_pinned(number, reason)
            self._pump()
            self._check_end()

    @property
    def _working_reader(self) -> Reader | None:
        """The reader, unless it gets no more work: who asks one that is ending would share its fault."""
        reader = self._reader
        is_working = (
            self._has_started and not self._is_retiring and reader is not None and not reader.is_ending
        )
        return reader if is_working else None

    def _open_waiting(self) -> None:
        if (reader := self._working_reader) is None:
            return
        for member in self._members.values():
            if not member.is_asked:
                member.is_asked = True
                body = messages.pack_open(member.column_offset, member.offer.SerializeToString())
                reader.ask(Kind.OPEN, member.number, body, Kind.OPENED, OPEN_SECONDS)

    def _opened(self, number: int, reason: str) -> None:
        if (member := self._members.get(number)) is None:  # it left meanwhile
            return
        if reason:
            self._turn_off(member, reason)
        else:
            member.is_open = True
            member.on_turn(True, f"the sidecar reads {self.uuid}")

    def _suspend(self, member: Member, reason: str) -> None:
        """Its engine copies, until the next reader has opened its memory."""
        member.is_open = False
        self._drop(member.number, reason)
        member.on_turn(False, f"the reader of its GPU starts again: {reason}")

    def _turn_off(self, member: Member, reason: str) -> None:
        """From now on its engine copies."""
        logger.warning("An engine on %s copies its stores itself: %s", self.uuid, reason)
        count_reason(self._stats.left_to_engines, reason)
        self.remove(member.number)
        member.on_turn(False, reason)

    def _retire(self, reason: str) -> None:
        """Let the reader end when nothing is under way, and the next one take its place."""
        self._is_retiring = True
        for member in self._members.values():
            self._suspend(member, reason)
        self._check_end()

    def _check_end(self) -> None:
        """Does the reader still have something to do?"""
        if self._reader is None or self._batches:
            return
        if self._is_retiring:
            self._reader.kill("another one takes its place")
        elif not self._members and not self._closing:
            self._is_retiring = True  # for who comes now there is the next one
            self._reader.kill("nobody needs it")

    def _reader_ended(self, reason: str) -> None:
        """It is reaped: nothing is under way any more."""
        has_started, is_retired = self._has_started, self._is_retiring
        self._reader, self._has_started, self._is_retiring = None, False, False
        self._pinned_rows, self.pins = 0, PinStatus()
        self._closing.clear()
        involved = {item.member for items in self._batches.values() for item in items}
        for number in list(self._batches):
            self._end_batch(number, reason)
        if self._members and not is_retired:
            self._stats.failed_readers += 1
        for member in list(self._members.values()):
            was_opening = member.is_asked and not member.is_open
            member.num_moves += not is_retired
            is_lost = member.number in involved or was_opening or member.num_moves > _MAX_MOVES
            self._suspend(member, reason)
            member.is_asked = False
            if not is_retired and (is_lost or not has_started):
                self._turn_off(member, reason)


def _grouped(items: Iterable[_Item]) -> list[messages.Copies]:
    """By client and KV group."""
    groups: defaultdict[tuple[int, int], list[SlotCopy]] = defaultdict(list)
    for item in items:
        groups[item.member, item.copy.group].append(item.copy)
    return [
        messages.Copies(
            member,
            group,
            np.array([copy.offset for copy in copies], "<u8"),
            np.stack([c.blocks for c in copies]),
        )
        for (member, group), copies in groups.items()
    ]
