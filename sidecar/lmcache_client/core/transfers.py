"""Loads and stores between the engine's KV and the arena. A thread of ``worker`` runs each of them.

- **Store**: waits for the fence after the step's forward pass. A slot is committed only if its copy ended
  before the engine reused the blocks (``StoreTransfer.note_copied``).
- **Load**: checks each slot after its copy. If the slot was reused meanwhile, the blocks are not loaded.
"""

from __future__ import annotations

import abc
import collections
import itertools
import logging
import threading
from collections.abc import Sequence
from functools import partial
from operator import itemgetter

from lmcache_client.core.copier import EngineCopier, Fence, RowLoad
from lmcache_client.core.jobs import GroupStore, LoadJob, Piece, StoreJob
from lmcache_client.core.parts import PartNames
from lmcache_client.rpc.errors import EngineCopiesError
from lmcache_client.rpc.session import BlockCopy, SidecarSession
from lmcache_store.tiers.memory.contracts import Reserved, Slot

logger = logging.getLogger(__name__)

_SLOTS_PER_CALL = 16
"""Slots that the sidecar copies in one call. Their copies count only when the sidecar has answered. So with
large calls, more copies are lost when the engine reuses blocks, and other clients wait longer."""

NumberedPiece = tuple[int, Piece]
"""Number of a chunk, and its piece."""


class EngineTransfer(abc.ABC):
    """A job that copies on another thread than the engine's."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = threading.Event()
        self.seconds = 0.0
        """Time that ``run`` took."""

    @property
    def figures(self) -> dict[str, float]:
        """Counts and seconds of this job, by the names of ``vllm.stats.FIGURES``."""
        return {}

    @abc.abstractmethod
    def run(self, session: SidecarSession, copier: EngineCopier) -> None:
        """Copy. Raises SidecarError."""


class LoadTransfer(EngineTransfer):
    """A running LoadJob."""

    def __init__(self, job: LoadJob, fence: Fence, names: PartNames | None = None) -> None:
        """``names``: those of the rank's part, if the scheduler is in another one."""
        super().__init__(job.request_id)
        self.job = job
        self._names = names
        self._fence = fence
        self._pieces: list[Piece] = []
        self._good: list[bool] = []  # for each piece: its bytes are proven right

    @property
    def bad_blocks(self) -> tuple[int, ...]:
        """Blocks that hold no valid KV. A block is valid if its piece and all earlier pieces are right."""
        good = itertools.takewhile(self._good.__getitem__, range(len(self._pieces)))
        return self.job.blocks[sum(len(self._pieces[number].blocks) for number in good) :]

    @property
    def figures(self) -> dict[str, float]:
        """See ``EngineTransfer``."""
        num_blocks, num_bad = len(self.job.blocks), len(self.bad_blocks)
        figures = {"loads": 1, "failed_loads": num_bad > 0, "loaded_blocks": num_blocks - num_bad}
        return figures | {"load_seconds": self.seconds}

    def run(self, session: SidecarSession, copier: EngineCopier) -> None:
        """Copy batch by batch, until a piece fails: KV after a gap is useless. Raises SidecarError."""
        if session.slots is None:
            return
        finds = () if self._names is None else (partial(self._names.find, session.index.find_few),)
        self._pieces = self.job.pieces(*finds)
        self._good = [False] * len(self._pieces)
        remaining = iter(self._batches(copier))  # each thread takes the next batch

        def copy_pieces() -> None:
            try:
                for numbers in remaining:
                    self._copy(session, copier, numbers)
                    if not all(self._good[numbers.start : numbers.stop]):
                        return
            finally:
                collections.deque(remaining, 0)  # exhausts the iterator, so that all threads stop

        with session.copying():
            copier.share(copy_pieces)

    def _batches(self, copier: EngineCopier) -> list[range]:
        """Return the numbers of the pieces of each batch, in order."""
        sizes = [copier.row_bytes[piece.group] for piece in self._pieces]
        batches, start, num_bytes = [], 0, 0
        for number, size in enumerate(sizes):
            if number > start and num_bytes + size > copier.batch_bytes:
                batches.append(range(start, number))
                start, num_bytes = number, 0
            num_bytes += size
        return [*batches, range(start, len(sizes))] if sizes else []

    def _copy(self, session: SidecarSession, copier: EngineCopier, numbers: range) -> None:
        """Copy pieces, up to the first one whose slot holds another row. Note which bytes are right."""
        loads = []
        for group, slot, first_block, blocks in self._pieces[numbers.start : numbers.stop]:
            if session.slots is None or not session.holds(slot):
                break  # the slot is of an older arena: its row may not even exist
            loads.append(RowLoad(group, session.view(slot.row, copier.row_bytes[group]), first_block, blocks))
        if loads:
            copier.load(loads, self._fence)
        for number in numbers[: len(loads)]:
            self._good[number] = session.holds(self._pieces[number].slot)


class StoreTransfer(EngineTransfer):
    """A running StoreJob. The engine's thread may call ``cancel`` at any time."""

    def __init__(self, job: StoreJob) -> None:
        super().__init__(job.request_id)
        self.job = job
        self.fence: Fence = None  # set before ``run``
        self._lock = threading.Lock()  # protects the fields below
        self._is_cancelled = False
        self._copied: list[Slot] = []
        self._num_rows = job.num_rows  # rows to copy; after the reservation, those that got a slot
        self._num_refused = 0  # rows that got no slot and are not in memory
        self._is_committed = False

    @property
    def figures(self) -> dict[str, float]:
        """See ``EngineTransfer``."""
        num_rows = len(self._copied)
        num_lost = self._num_rows - num_rows if self._is_cancelled else 0
        return {"stores": 1, "stored_rows": num_rows, "lost_rows": num_lost, "store_seconds": self.seconds}

    @property
    def is_complete(self) -> bool:
        """True if all rows are in memory now. Another client may have stored some of them before."""
        return self._is_committed and not self._num_refused and len(self._copied) == self._num_rows

    def cancel(self) -> None:
        """Let no later copy of this job count, because the engine reuses the blocks."""
        with self._lock:
            self._is_cancelled = True

    def note_copied(self, slot: Slot) -> bool:
        """Count a copy that ended, unless the job was cancelled before. Return True if it counts.

        The bytes of a copy that ended after ``cancel`` may be torn.
        """
        with self._lock:
            if not self._is_cancelled:
                self._copied.append(slot)
            return not self._is_cancelled

    def run(self, session: SidecarSession, copier: EngineCopier) -> None:
        """Reserve slots and copy into them. Commit copies that count, abort the rest. Raises SidecarError.

        Copies all groups of a chunk one after the other, because a chunk needs all of them. Begins with the
        first chunk; for groups that need only the last chunks, with the last one.
        """
        if session.slots is None or self._is_cancelled:
            return
        reserved: list[NumberedPiece] = []
        with session.copying():
            try:
                for store in self.job.groups:
                    reserved += self._reserve(session, store)
                reserved.sort(key=itemgetter(0), reverse=self.job.is_transient)
                self._num_rows = len(reserved)
                self.copy(session, copier, reserved)
            finally:
                self._commit(session, [piece.slot for _, piece in reserved])

    def copy(self, session: SidecarSession, copier: EngineCopier, reserved: Sequence[NumberedPiece]) -> None:
        """Fill the reserved slots, and note each copy, until one does not count."""
        pieces = [piece for _, piece in reserved]
        if session.store_copier.is_sidecar and self._copy_by_sidecar(session, copier, pieces):
            return
        for piece in pieces:
            if piece.slot in self._copied:
                continue
            row = session.view(piece.slot.row, copier.row_bytes[piece.group])
            copier.store(piece.group, row, piece.blocks, self.fence)
            if not self.note_copied(piece.slot):
                break

    def _copy_by_sidecar(
        self, session: SidecarSession, copier: EngineCopier, pieces: Sequence[Piece]
    ) -> bool:
        """Let the sidecar copy. Returns False if the sidecar can't, and the engine must copy the rest.

        The sidecar does not wait for the engine's GPU work. So that work must have ended before the call.
        """
        copier.wait(self.fence)
        for first in range(0, len(pieces), _SLOTS_PER_CALL):
            if self._is_cancelled:
                break
            part = [BlockCopy(p.group, p.slot, p.blocks) for p in pieces[first : first + _SLOTS_PER_CALL]]
            try:
                is_filled = session.copy_blocks(part)
            except EngineCopiesError as error:
                logger.warning("The sidecar stops copying: the engine copies its stores: %s", error.message)
                return False
            for copy, is_good in zip(part, is_filled, strict=True):
                if is_good:
                    self.note_copied(copy.slot)
        return True

    def _reserve(self, session: SidecarSession, store: GroupStore) -> list[NumberedPiece]:
        """Reserve slots. Return the piece to copy of each chunk that got a slot."""
        answers = session.reserve(
            store.group,
            store.keys,
            request_id=self.job.request_id,
            first_chunk=store.first_chunk,
            tenant=self.job.tenant,
        )
        self._num_refused += sum(answer.result is Reserved.BUSY for answer in answers)
        per_chunk = len(store.blocks) // len(answers)
        blocks = (store.blocks[first : first + per_chunk] for first in range(0, len(store.blocks), per_chunk))
        return [
            (chunk, Piece(store.group, answer.slot, 0, part))
            for chunk, (answer, part) in enumerate(zip(answers, blocks, strict=True), store.first_chunk)
            if answer.slot is not None
        ]

    def _commit(self, session: SidecarSession, reserved: list[Slot]) -> None:
        """Commit the slots whose copies count, and abort the other slots."""
        uncopied = [slot for slot in reserved if slot not in self._copied]
        try:
            if self._copied:
                session.commit(self._copied)
            self._is_committed = True
        finally:
            if uncopied:
                session.abort(uncopied)
