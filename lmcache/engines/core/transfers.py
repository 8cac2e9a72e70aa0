"""One load or store between the engine's KV and the arena. A thread of ``worker`` runs it.

- **Store**: waits for the fence that was set after the step's forward; a slot is committed only if its copy
  ended while the engine still owned the blocks (``StoreTransfer.note_copied``).
- **Load**: each slot is checked after its copy; was it given away meanwhile, the blocks count as not loaded.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Sequence
from operator import itemgetter

from lmcache.engines.core.copier import EngineCopier, Fence
from lmcache.engines.core.jobs import GroupStore, LoadJob, Piece, StoreJob
from lmcache.rpc.client import Session
from lmcache.rpc.errors import EngineCopiesError
from lmcache.rpc.session import BlockCopy
from lmcache.tiers.memory.contracts import Slot

logger = logging.getLogger(__name__)

_SLOTS_PER_CALL = 16
"""Of the sidecar. What it has copied counts from its answer on: much at once is little that counts when the
engine takes blocks back, and makes others wait."""


class LoadTransfer:
    """A LoadJob under way."""

    def __init__(self, job: LoadJob, fence: Fence) -> None:
        self.job = job
        self.ended = threading.Event()
        self.seconds = 0.0
        self._fence = fence
        self._pieces: list[Piece] = []
        self._good: list[bool] = []  # of each piece: its bytes are proven

    @property
    def bad_blocks(self) -> tuple[int, ...]:
        """Blocks that can't be used: all, until their pieces are proven good."""
        good = itertools.takewhile(lambda at: self._good[at], range(len(self._pieces)))
        return self.job.blocks[sum(len(self._pieces[at].blocks) for at in good) :]

    @property
    def figures(self) -> dict[str, float]:
        """What came of it, to be summed up."""
        num_blocks, num_bad = len(self.job.blocks), len(self.bad_blocks)
        figures = {"loads": 1, "failed_loads": num_bad > 0, "loaded_blocks": num_blocks - num_bad}
        return figures | {"load_seconds": self.seconds}

    def run(self, session: Session, copier: EngineCopier) -> None:
        """Copy piece by piece; a bad one ends it: KV after a gap is useless. Raises SidecarError."""
        if session.slots is None:
            return
        self._pieces = self.job.pieces()
        self._good = [False] * len(self._pieces)
        todo = iter(range(len(self._pieces)))  # each thread takes the next one

        def copy_pieces() -> None:
            try:
                for at in todo:
                    self._good[at] = self._copy(session, copier, self._pieces[at])
                    if not self._good[at]:
                        return
            finally:
                collections.deque(todo, 0)  # nobody goes on

        with session.copying():
            copier.share(copy_pieces)

    def _copy(self, session: Session, copier: EngineCopier, piece: Piece) -> bool:
        """Return whether the bytes are good."""
        if session.slots is None or not session.holds(piece.slot):
            return False  # from an older arena: its row may not even exist
        row = session.view(piece.slot.row, copier.row_bytes[piece.group])
        copier.load(piece.group, row, piece.first_block, piece.blocks, self._fence)
        return session.holds(piece.slot)


class StoreTransfer:
    """A StoreJob under way. ``cancel`` may come at any time, from the engine's thread."""

    def __init__(self, job: StoreJob) -> None:
        self.job = job
        self.fence: Fence = None  # set before ``run``
        self.ended = threading.Event()
        self.seconds = 0.0
        self._lock = threading.Lock()  # protects what follows
        self._is_cancelled = False
        self._copied: list[Slot] = []
        self._num_rows = job.num_rows  # to copy, as far as is known

    @property
    def figures(self) -> dict[str, float]:
        """What came of it, to be summed up."""
        num_rows = len(self._copied)
        num_lost = self._num_rows - num_rows if self._is_cancelled else 0
        return {"stores": 1, "stored_rows": num_rows, "lost_rows": num_lost, "store_seconds": self.seconds}

    def cancel(self) -> None:
        """From now on no copy of this job counts: the engine takes the blocks back."""
        with self._lock:
            self._is_cancelled = True

    def note_copied(self, slot: Slot) -> bool:
        """Count a copy that ended, unless the engine took the blocks back before: its bytes may be torn."""
        with self._lock:
            if not self._is_cancelled:
                self._copied.append(slot)
            return not self._is_cancelled

    def run(self, session: Session, copier: EngineCopier) -> None:
        """Reserve, copy, commit what was copied in time, abort the rest. Raises SidecarError.

        All groups of a chunk go together, for it is of no use without one of them: the head of the chain
        first, where all of it is needed, else the last chunk.
        """
        if session.slots is None or self._is_cancelled:
            return
        reserved: list[tuple[int, Piece]] = []  # by chunk
        with session.copying():
            try:
                for store in self.job.groups:
                    reserved += self._reserve(session, store)
                reserved.sort(key=itemgetter(0), reverse=self.job.is_transient)
                self._num_rows = len(reserved)
                pieces = [piece for _, piece in reserved]
                if session.store_copier.is_sidecar and self._have_copied(session, copier, pieces):
                    return
                for piece in pieces:
                    if piece.slot in self._copied:
                        continue
                    row = session.view(piece.slot.row, copier.row_bytes[piece.group])
                    copier.store(piece.group, row, piece.blocks, self.fence)
                    if not self.note_copied(piece.slot):
                        break
            finally:
                self._commit(session, [piece.slot for _, piece in reserved])

    def _have_copied(self, session: Session, copier: EngineCopier, reserved: Sequence[Piece]) -> bool:
        """Let the sidecar copy. False: it can't any more, and the engine has to copy the rest.

        It reads what lies in the blocks when it is told to, so the engine's work on them must be done before.
        """
        copier.wait(self.fence)
        for at in range(0, len(reserved), _SLOTS_PER_CALL):
            if self._is_cancelled:
                break
            part = [BlockCopy(p.group, p.slot, p.blocks) for p in reserved[at : at + _SLOTS_PER_CALL]]
            try:
                is_filled = session.copy_blocks(part)
            except EngineCopiesError as error:
                logger.warning("From now on the engine copies its stores itself: %s", error.message)
                return False
            for copy, is_good in zip(part, is_filled, strict=True):
                if is_good:
                    self.note_copied(copy.slot)
        return True

    def _reserve(self, session: Session, store: GroupStore) -> list[tuple[int, Piece]]:
        """Numbers of chunks, and what is to be copied of them."""
        answers = session.reserve(
            store.group,
            store.keys,
            request_id=self.job.request_id,
            first_chunk=store.first_chunk,
            tenant=self.job.tenant,
        )
        per_chunk = len(store.blocks) // len(answers)
        blocks = (store.blocks[at : at + per_chunk] for at in range(0, len(store.blocks), per_chunk))
        return [
            (chunk, Piece(store.group, answer.slot, 0, part))
            for chunk, (answer, part) in enumerate(zip(answers, blocks, strict=True), store.first_chunk)
            if answer.slot is not None
        ]

    def _commit(self, session: Session, reserved: list[Slot]) -> None:
        """Commit what was copied in time, give the rest back."""
        rest = [slot for slot in reserved if slot not in self._copied]
        try:
            if self._copied:
                session.commit(self._copied)
        finally:
            if rest:
                session.abort(rest)
