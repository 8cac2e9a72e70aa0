"""One load or store between the engine's KV and the arena. A thread of ``worker`` runs it.

- **Store**: waits for the fence that was set after the step's forward; a slot is committed only if its copy
  ended while the engine still owned the blocks (``StoreTransfer.note_copied``).
- **Load**: each slot is checked after its copy; was it given away meanwhile, the blocks count as not loaded.
"""

from __future__ import annotations

import collections
import itertools
import threading

from lmcache.engines.core.copier import EngineCopier, Fence
from lmcache.engines.core.jobs import GROUP, LoadJob, Piece, StoreJob
from lmcache.rpc.client import Session
from lmcache.tiers.memory.contracts import Reserved, Slot


class LoadTransfer:
    """A LoadJob under way."""

    def __init__(self, job: LoadJob, fence: Fence) -> None:
        self.job = job
        self.ended = threading.Event()
        self._fence = fence
        self._num_good = 0  # blocks, from the first one on, whose bytes are proven

    @property
    def bad_blocks(self) -> tuple[int, ...]:
        """Blocks that can't be used: all, until their pieces are proven good."""
        return self.job.blocks[self._num_good :]

    def run(self, session: Session, copier: EngineCopier) -> None:
        """Copy piece by piece; a bad one ends it: KV after a gap is useless. Raises SidecarError."""
        if session.slots is None:
            return
        pieces = list(self.job.pieces())
        good = [False] * len(pieces)
        todo = iter(range(len(pieces)))  # each thread takes the next one

        def copy_pieces() -> None:
            try:
                for at in todo:
                    good[at] = self._copy(session, copier, pieces[at])
                    if not good[at]:
                        return
            finally:
                collections.deque(todo, 0)  # nobody goes on

        with session.copying():
            try:
                copier.share(copy_pieces)
            finally:
                done = itertools.takewhile(lambda at: good[at], range(len(pieces)))
                self._num_good = sum(len(pieces[at].blocks) for at in done)

    def _copy(self, session: Session, copier: EngineCopier, piece: Piece) -> bool:
        """Return whether the bytes are good."""
        if session.slots is None or not session.holds(piece.slot):
            return False  # from an older arena: its row may not even exist
        copier.load(session.slots[piece.slot.row], piece.first_block, piece.blocks, self._fence)
        return session.holds(piece.slot)


class StoreTransfer:
    """A StoreJob under way. ``cancel`` may come at any time, from the engine's thread."""

    def __init__(self, job: StoreJob) -> None:
        self.job = job
        self.fence: Fence = None  # set before ``run``
        self.ended = threading.Event()
        self._lock = threading.Lock()  # protects what follows
        self._is_cancelled = False
        self._copied: list[Slot] = []

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
        """Reserve, copy, commit what was copied in time, abort the rest. Raises SidecarError."""
        if session.slots is None or self._is_cancelled:
            return
        with session.copying():
            reserved = self._reserve(session)
            try:
                per_chunk = len(self.job.blocks) // len(self.job.hashes)
                for chunk, slot in reserved:
                    blocks = self.job.blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
                    copier.store(session.slots[slot.row], blocks, self.fence)
                    if not self.note_copied(slot):
                        break
            finally:
                self._settle(session, [slot for _, slot in reserved])

    def _reserve(self, session: Session) -> list[tuple[int, Slot]]:
        job = self.job
        answers = session.reserve(
            GROUP,
            job.context.row_keys(job.hashes, job.first_chunk),
            request_id=job.request_id,
            first_chunk=job.first_chunk,
            tenant=job.context.tenant,
        )
        return [
            (chunk, answer.slot)
            for chunk, answer in enumerate(answers)
            if answer.result is Reserved.SLOT and answer.slot is not None
        ]

    def _settle(self, session: Session, reserved: list[Slot]) -> None:
        rest = [slot for slot in reserved if slot not in self._copied]
        try:
            if self._copied:
                session.commit(self._copied)
        finally:
            if rest:
                session.abort(rest)
