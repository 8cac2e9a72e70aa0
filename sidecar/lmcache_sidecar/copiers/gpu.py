"""One GPU: its clients, and the reader process that copies for them. One event loop owns it.

A copy is **under way** from the moment the sidecar sends it until the reader reports its end, or the reader's
process is reaped. Neither a time-out nor a lost client proves that a copy has ended. A job ends, and its
slots may be reused, when none of its copies is queued or under way.

The sidecar replaces the reader in two cases:

- Its process id equals that of an engine that attaches now. CUDA refuses such a reader.
- It failed. A client that had copies under way, or whose memory was being opened, copies for itself from then
  on. All other clients continue with the next reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.batches import CopyQueue
from lmcache_sidecar.copiers.jobs import CopyStats, Job, PlacedCopy
from lmcache_sidecar.copiers.members import Member
from lmcache_sidecar.copiers.messages import MessageKind
from lmcache_sidecar.copiers.process import ReaderProcess
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.stats import count_reason

logger = logging.getLogger(__name__)


_SAME_PID = "the reader of its GPU has the same process id as an engine"
_PINNED = "the reader of its GPU had memory pinned that the memory tier gives back"

_MAX_MOVES = 3
"""Moves to another reader after faults that were not the client's; then the client copies for itself."""


class GpuCopier:
    """One GPU, its clients and its reader; see the module's description."""

    def __init__(self, uuid: str, arena: ArenaFile, stats: CopyStats) -> None:
        self.uuid = uuid
        self.pins = PinStatus()
        """Amount of the arena that the reader has pinned."""
        self._arena, self._stats = arena, stats
        self._members: dict[int, Member] = {}
        self._copies = CopyQueue(stats)
        self._closing: set[int] = set()  # members that left and are still open in the reader
        self._reader: ReaderProcess | None = None
        self._has_started = False  # the reader has
        self._is_retiring = False  # the reader gets no more work
        self._pinned_rows = 0  # ready rows that were reported to the reader
        self._task: asyncio.Task[None] | None = None

    @property
    def num_slots_under_way(self) -> int:
        """Slots that a reader may be writing to."""
        return self._copies.num_slots_under_way

    @property
    def is_idle(self) -> bool:
        """True when the GPU has no client, and its reader has ended."""
        return self._task is None

    # ---- clients ----

    def add(self, member: Member) -> None:
        """Add a client; the sidecar copies for it as soon as the reader has opened its memory."""
        for other in list(self._members.values()):
            if other.handles & member.handles:  # its process is dead: the driver reused the address
                self._turn_off(other, "another process offers the same GPU memory")
        self._members[member.number] = member
        member.on_turn(False, "the reader of its GPU is starting")
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._reader is not None and self._reader.pid == member.pid:
            self._retire(_SAME_PID)
        self._open_waiting()

    def remove(self, number: int) -> None:
        """Remove a client that left, and close its memory."""
        member = self._members.pop(number, None)
        if member is None:
            return
        self._copies.drop(number, "the client has left")
        if member.is_asked and self._reader is not None:
            self._closing.add(number)
            self._reader.ask(MessageKind.CLOSE, number, b"", MessageKind.CLOSED, TIMING.reader_close_seconds)
        self._check_end()

    def grow(self) -> None:
        """Report newly populated rows to the reader.

        A smaller number of rows is never reported, because a copy to those rows may be under way.
        """
        ready_rows = self._arena.ready_rows
        if self._reader is not None and self._has_started and ready_rows > self._pinned_rows:
            self._pinned_rows = ready_rows
            self._reader.send(MessageKind.GROWN, ready_rows)

    def release_surplus(self) -> bool:
        """End the reader if it has rows pinned that are not ready any more. Returns True if it has none."""
        if self._pinned_rows <= self._arena.ready_rows:
            return True
        if not self._is_retiring:
            self._retire(_PINNED)
        return False

    async def close(self) -> None:
        """Kill the reader and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ---- copies ----

    def begin(self, number: int, copies: Sequence[PlacedCopy]) -> Job:
        """Start to fill slots of a client whose memory is open."""
        job = self._copies.put(self._members[number], copies)
        self._send_batches()
        return job

    def drop(self, number: int, job: Job) -> None:
        """Drop what is still queued of a job whose caller has disconnected."""
        self._copies.drop(number, "the caller has disconnected", job)

    def _send_batches(self) -> None:
        """Send batches to the reader until enough are under way."""
        if (reader := self._working_reader) is None:
            return
        while (batch := self._copies.take_batch()) is not None:
            number, body = batch
            reader.ask(MessageKind.COPY, number, body, MessageKind.COPIED, TIMING.copy_seconds)

    # ---- the reader ----

    async def _run(self) -> None:
        """Run one reader after another while there are clients."""
        try:
            while self._members:
                await self._run_reader()
        finally:
            self._task = None

    async def _run_reader(self) -> None:
        reason = "the sidecar is stopping"
        try:
            self._reader = await ReaderProcess.start(self.uuid, self._arena.fileno(), self._pids)
            self._stats.started_readers += 1
            await self._serve(self._reader)
        except OSError as error:
            reason = f"the reader of its GPU can't be started: {error}"
        except Exception as error:  # after any fault of a reader, the engines copy for themselves
            logger.exception("Reading %s failed", self.uuid)
            reason = repr(error)
        finally:
            if self._reader is not None:
                reason = await self._reader.reap()
            self._reader_ended(reason)

    def _pids(self) -> set[int]:
        return {member.pid for member in self._members.values()}

    async def _serve(self, reader: ReaderProcess) -> None:
        """Handle a reader's messages until it ends."""
        geometry = self._arena.geometry
        assert geometry is not None, "clients are attached"
        arena_format = messages.Format(geometry.slot_bytes, self._arena.num_rows, self._arena.ready_rows)
        self._pinned_rows = arena_format.ready_rows
        start = messages.pack_start(self.uuid, arena_format)
        reader.ask(MessageKind.START, 0, start, MessageKind.STARTED, TIMING.reader_start_seconds)
        while (message := await reader.receive()) is not None:
            kind, number, reason = message
            if kind == MessageKind.STARTED:
                logger.info("Reader %d reads %s", reader.pid, self.uuid)
                self._has_started = True
                self.grow()
                self._open_waiting()
            elif kind == MessageKind.OPENED:
                self._opened(number, reason)
            elif kind == MessageKind.COPIED:
                self._copies.end_batch(number)
            elif kind == MessageKind.CLOSED:
                self._closing.discard(number)
            elif kind == MessageKind.PINNED:
                self.pins = messages.parse_pinned(number, reason)
            self._send_batches()
            self._check_end()

    @property
    def _working_reader(self) -> ReaderProcess | None:
        """The reader, unless it gets no more work: a client that asks an ending reader shares its fault."""
        reader = self._reader
        is_working = (
            self._has_started and not self._is_retiring and reader is not None and not reader.is_ending
        )
        return reader if is_working else None

    def _open_waiting(self) -> None:
        """Ask the reader to open the memory of all clients that it was not asked for yet."""
        if (reader := self._working_reader) is None:
            return
        for member in self._members.values():
            if not member.is_asked:
                member.is_asked = True
                body = messages.pack_open(member.column_offset, member.offer.SerializeToString())
                reader.ask(
                    MessageKind.OPEN, member.number, body, MessageKind.OPENED, TIMING.reader_open_seconds
                )

    def _opened(self, number: int, reason: str) -> None:
        """Handle the reader's answer to OPEN; a ``reason`` says why it could not open the memory."""
        if (member := self._members.get(number)) is None:  # the client left meanwhile
            return
        if reason:
            self._turn_off(member, reason)
        else:
            member.is_open = True
            member.on_turn(True, f"the sidecar reads {self.uuid}")

    def _suspend(self, member: Member, reason: str) -> None:
        """Let the engine copy until the next reader has opened its memory."""
        member.is_open = False
        self._copies.drop(member.number, reason)
        member.on_turn(False, f"the reader of its GPU is restarting: {reason}")

    def _turn_off(self, member: Member, reason: str) -> None:
        """Let the engine copy from now on."""
        logger.warning("An engine on %s copies its stores itself: %s", self.uuid, reason)
        count_reason(self._stats.left_to_engines, reason)
        self.remove(member.number)
        member.on_turn(False, reason)

    def _retire(self, reason: str) -> None:
        """Replace the reader as soon as nothing is under way."""
        self._is_retiring = True
        for member in self._members.values():
            self._suspend(member, reason)
        self._check_end()

    def _check_end(self) -> None:
        """Kill the reader if it has nothing left to do."""
        if self._reader is None or self._copies.num_slots_under_way:
            return
        if self._is_retiring:
            self._reader.kill("the sidecar replaces the reader of its GPU")
        elif not self._members and not self._closing:
            self._is_retiring = True  # a client that attaches now gets the next reader
            self._reader.kill("no client needs the reader of its GPU")

    def _reader_ended(self, reason: str) -> None:
        """Clean up after a reader that is reaped: nothing is under way any more."""
        has_started, is_retired = self._has_started, self._is_retiring
        self._reader, self._has_started, self._is_retiring = None, False, False
        self._pinned_rows, self.pins = 0, PinStatus()
        self._closing.clear()
        involved = self._copies.end_all(reason)
        if self._members and not is_retired:
            self._stats.failed_readers += 1
        for member in list(self._members.values()):
            was_opening = member.is_asked and not member.is_open
            member.num_moves += not is_retired
            must_turn_off = member.number in involved or was_opening or member.num_moves > _MAX_MOVES
            self._suspend(member, reason)
            member.is_asked = False
            if not is_retired and (must_turn_off or not has_started):
                self._turn_off(member, reason)
