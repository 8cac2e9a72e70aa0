"""Takes documents out of computed prompts, on the worker side: see ``taking``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from lmcache_client.core.copier import STAGING_GROUP, EngineCopier
from lmcache_client.core.layout import Layout
from lmcache_client.core.transfers import NumberedPiece, StoreTransfer
from lmcache_client.rpc.session import SidecarSession
from lmcache_client.vllm.blend.taking import TakeJob


class Taker(Protocol):
    """The part of ``Blender`` that moves documents to staging blocks."""

    staging: Layout
    """See ``Blender``."""

    def take(self, job: TakeJob, chunks: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """See ``Blender``."""


class TakeTransfer(StoreTransfer):
    """A running TakeJob. Blended prompts may wait for its copies, because it holds the staging blocks."""

    def __init__(self, job: TakeJob, taker: Taker, staging_lock: threading.Lock) -> None:
        super().__init__(job)
        self._take_job, self._taker, self._staging_lock = job, taker, staging_lock

    def copy(self, session: SidecarSession, copier: EngineCopier, reserved: Sequence[NumberedPiece]) -> None:
        """See ``StoreTransfer``. The engine copies, because the sidecar does not know the staging blocks."""
        copier.wait(self.fence)  # the side streams of the engine's device do not wait for its work
        per_row = self._taker.staging.blocks_per_row
        size = len(self._taker.staging.pages[0]) // per_row
        for first in range(0, len(reserved), size):
            if self._is_cancelled:
                return
            chunks, pieces = zip(*reserved[first : first + size], strict=True)
            with self._staging_lock:
                self._taker.take(self._take_job, chunks, [piece.blocks for piece in pieces])
                for number, piece in enumerate(pieces):
                    row = session.view(piece.slot.row, copier.row_bytes[piece.group])
                    staged = range(number * per_row, (number + 1) * per_row)
                    copier.store(STAGING_GROUP, row, staged, self.fence)
                    if not self.note_copied(piece.slot):
                        return
