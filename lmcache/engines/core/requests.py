"""What the scheduler side knows of the engine's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache import keys
from lmcache.engines.core.jobs import Offer
from lmcache.engines.core.waiting import RowWait
from lmcache.tiers.base import ROW_KEY_BYTES, RowKey
from lmcache.tiers.memory.contracts import LookupResult

ExtraKeys = tuple[tuple[int, bytes], ...]
"""What chunks depend on beside their tokens: LoRA and media, as (first chunk, fingerprint), ascending."""

FindExtraKeys = Callable[[], "ExtraKeys | None"]
"""May do I/O. What returns None is not cached, or not yet."""

_WORD = np.dtype("<u8")


class EngineRequest(Protocol):
    """What is read of an engine's request; vLLM's own is one."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    """Chained: each folds in all tokens before its end."""
    cache_salt: str | None
    skip_reading_prefix_cache: bool


@dataclass(eq=False)
class Ticket:
    """One request's question to the sidecar. The lookup thread writes what follows ``asked_at``, the
    scheduler reads."""

    request_id: str
    hashes: list[bytes]
    """Of each chunk to look up: its last block's."""
    namespace: bytes
    """The engine's, or since a reset another one."""
    cache_salt: str = ""
    tenant: bytes = b""
    """Opaque, of the salt."""
    find_extra_keys: FindExtraKeys | None = None
    """None: it depends on nothing but its tokens."""
    is_read: bool = True
    """Else it is only stored."""
    asked_at: float = 0.0
    """The scheduler's own."""
    extra_keys: ExtraKeys | None = None
    """None: not known yet, or not to be cached."""
    keys: tuple[list[RowKey], ...] | None = None
    """Per group with rows, of the chunks; None: not known yet, and never again."""
    words: tuple[npt.NDArray[np.uint64], ...] = ()
    """The same for the index: ``[chunks, 8]``. Written before ``keys``."""
    answer: LookupResult | None = None
    """None: not answered yet."""
    answered_at: float = 0.0
    is_asking: bool = False
    """A hint is on its way."""
    may_be_leased: bool = False
    """Also when no answer came; the lookup thread's own."""

    def __post_init__(self) -> None:
        if self.find_extra_keys is None:
            self.extra_keys = ()

    def make_keys(self, groups: Sequence[int]) -> None:
        """Make the keys of all chunks; both threads may come to it, and do the same then."""
        hashes = self.hashes if self.extra_keys is not None else []
        made = tuple(self.row_keys(group, hashes) for group in groups)
        words = ROW_KEY_BYTES // _WORD.itemsize
        self.words = tuple(np.frombuffer(b"".join(part), _WORD).reshape(-1, words) for part in made)
        self.keys = made

    def row_keys(self, group: int, hashes: Sequence[bytes], first_chunk: int = 0) -> list[RowKey]:
        """Make the keys of chunks from ``first_chunk`` on in one KV group."""
        row_keys: list[RowKey] = []
        fingerprint, edges = b"", (*(self.extra_keys or ()), (first_chunk + len(hashes), b""))
        for edge, following in edges:
            part = hashes[len(row_keys) : max(0, edge - first_chunk)]
            row_keys += [
                self.namespace + key for key in keys.chunk_keys(part, fingerprint, self.cache_salt, group)
            ]
            fingerprint = following
        return row_keys


class RequestState:
    """What is known of one request."""

    def __init__(self, request: EngineRequest, ticket: Ticket) -> None:
        self.request = request
        self.is_finished = False
        self.has_failed = False  # a load failed: don't try again, it could fail for ever
        self.is_loading = False
        self.num_stores = 0  # StoreJobs that not all ranks ended
        self.has_drafts = False  # how many of its tokens are computed may be known later only
        self.restart(ticket)

    def restart(self, ticket: Ticket) -> None:
        """Nothing of it is computed, or not any more."""
        self.ticket = ticket
        self.is_allocated = False  # to be asked for after that means to restart
        self.wait: RowWait | None = None  # while it waits for rows
        self.num_found = 0  # leading chunks in memory, when it was last asked for
        self.num_held = 0  # and in the engine itself
        self.forget_progress()

    def forget_progress(self) -> None:
        """Its blocks are given away."""
        self.offer: Offer | None = None
        self.num_stored_chunks = 0  # leading chunks that need no store: stored, or found


class Computing:
    """Chunks that are being computed now, until they are stored: whoever needs one waits for it.

    A chunk goes by its key in the first KV group with rows, which is stored last.
    """

    def __init__(self) -> None:
        self._states: dict[RowKey, RequestState] = {}

    def __contains__(self, key: RowKey) -> bool:
        return key in self._states

    def begin(self, state: RequestState) -> None:
        """The request computes what was not found."""
        self._states |= dict.fromkeys(_chunks(state)[state.num_stored_chunks :], state)

    def end(self, state: RequestState, chunks: slice = slice(None)) -> None:  # immutable
        """The request does not compute these any more, or they are stored."""
        for key in _chunks(state)[chunks]:
            if self._states.get(key) is state:
                del self._states[key]

    def clear(self) -> None:
        """Nothing that is computed now is for others."""
        self._states.clear()


def _chunks(state: RequestState) -> list[RowKey]:
    return state.ticket.keys[0] if state.ticket.keys else []
