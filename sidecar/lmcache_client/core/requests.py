"""State of the engine's requests on the scheduler side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_client.core.hits import KeyWords, words_of
from lmcache_client.core.jobs import Offer
from lmcache_client.core.times import RequestClock
from lmcache_client.core.waiting import RowWait
from lmcache_store import keys
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import LookupResult

ExtraKeys = tuple[tuple[int, bytes], ...]
"""Fingerprints of adapters and media that chunks depend on, as (first chunk, fingerprint), ascending."""

FindExtraKeys = Callable[[], ExtraKeys]
"""Finds a request's extra keys. May do I/O. Raises UnnamedError if it can't be cached, or not yet."""


class EngineRequest(Protocol):
    """The fields of an engine's request that the scheduler side reads, such as vLLM's ``Request``."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    """Hashes of the engine's blocks. Each covers all tokens up to the block's end."""
    cache_salt: str | None
    skip_reading_prefix_cache: bool


@dataclass(eq=False)
class Ticket:
    """One request's lookups.

    The scheduler's thread creates the ticket. The lookup thread then asks the sidecar, and writes the answer.
    A **hint** is a lookup without a lease, sent when the request arrives and while it waits. The sidecar
    answers which chunks it is loading from lower tiers, and begins to load more.
    """

    request_id: str
    hashes: list[bytes]
    """Hash of the last block of each chunk to look up."""
    namespace: bytes
    """Namespace of the request's keys. Each reset of the engine's prefix cache begins a new namespace."""
    cache_salt: str = ""
    tenant: bytes = b""
    """Tenant as the sidecar sees it, a hash of the salt."""
    find_extra_keys: FindExtraKeys | None = None
    """Finds the extra keys; None if the KV depends on nothing but the tokens."""
    is_read: bool = True
    """False if the request only stores KV."""
    first_hashes: Sequence[bytes] = ()
    """Hashes of the engine's blocks in the first chunk, without the last block."""
    num_handed_over: int = 0
    """Leading chunks that another engine has computed a moment ago, and may still be storing."""
    is_counted: bool = True
    """False for a document within a prompt: the sidecar counts the prompt, and the rows that are loaded."""
    first_loaded: int = 0
    """First chunk of a document that its prompt loads. The prompt has those before it."""
    asked_at: float = 0.0
    """Time of the last hint. Only the scheduler's thread uses it."""
    extra_keys: ExtraKeys | None = None
    """Extra keys of the request; None: not known yet, or the request can't be cached."""
    uncached_reason: str = ""
    """Why the request can't be cached; empty: it can, or its extra keys are not known yet."""
    keys: tuple[list[RowKey], ...] | None = None
    """Row keys of the chunks, per group with rows; None: not known yet. Once known they don't change."""
    words: tuple[KeyWords, ...] = ()
    """The same keys as 64-bit numbers ``[chunks, 8]``, for lookups in the arena's index. Set before
    ``keys``."""
    answer: LookupResult | None = None
    """The sidecar's last answer; None: not answered yet."""
    answered_at: float = 0.0
    is_asking: bool = False
    """True while a hint is queued, or the sidecar's answer to it is awaited."""
    may_be_leased: bool = False
    """True if the sidecar may protect the request's rows from eviction (a lease).

    This is so once a lease was requested, even without an answer. Only the lookup thread uses this field.
    """

    def __post_init__(self) -> None:
        if self.find_extra_keys is None:
            self.extra_keys = ()

    def make_keys(self, groups: Sequence[int]) -> None:
        """Compute the keys of all chunks.

        Both the scheduler's thread and the lookup thread may call this; they compute the same keys.
        """
        hashes = self.hashes if self.extra_keys is not None else []
        keys_by_group = tuple(self.row_keys(group, hashes) for group in groups)
        self.words = tuple(words_of(b"".join(part)) for part in keys_by_group)
        self.keys = keys_by_group

    def row_keys(self, group: int, hashes: Sequence[bytes], first_chunk: int = 0) -> list[RowKey]:
        """Compute the row keys of the chunks from ``first_chunk`` on in one KV group."""
        row_keys: list[RowKey] = []
        # At each edge another fingerprint begins. Every pass adds the keys of the chunks before one edge.
        fingerprint, edges = b"", (*(self.extra_keys or ()), (first_chunk + len(hashes), b""))
        for edge, following in edges:
            part = hashes[len(row_keys) : max(0, edge - first_chunk)]
            row_keys += [
                self.namespace + key for key in keys.chunk_keys(part, fingerprint, self.cache_salt, group)
            ]
            fingerprint = following
        return row_keys


class RequestState:
    """State of one request on the scheduler side."""

    def __init__(self, request: EngineRequest, ticket: Ticket) -> None:
        self.request = request
        self.priority: int = getattr(request, "priority", 0)  # the lowest number is the highest priority
        self.progressed_at = 0.0  # time of the last step that was scheduled to compute tokens of the prompt
        self.is_finished = False
        self.has_failed = False  # a load failed: it is not repeated, because it could fail forever
        self.is_loading = False
        self.num_stores = 0  # StoreJobs that not all ranks have ended
        self.has_drafts = False  # True: the number of computed tokens may only be known later
        self.is_exact = True  # False: its blocks may hold blended KV, which is never stored
        self.clock: RequestClock | None = None  # None: the last prompt token is computed, or about to be
        self.restart(ticket)

    def restart(self, ticket: Ticket) -> None:
        """Reset the request to a state in which none of its tokens is computed."""
        self.ticket = ticket
        self.is_allocated = False  # True: if the engine asks for the request again, it restarts
        self.wait: RowWait | None = None  # while the request waits for rows
        self.num_found = 0  # leading chunks in memory at the last lookup
        self.num_held = 0  # leading chunks in the engine itself at that time
        self.num_engine_tokens = 0  # leading tokens in the engine itself at that time
        self.num_blended_tokens = 0  # tokens of documents to be placed at another position
        self.forget_progress()

    def forget_progress(self) -> None:
        """Reset what depends on the request's blocks, because the engine reuses them."""
        self.offer: Offer | None = None  # the load that the connector has offered the engine
        self.num_stored_chunks = 0  # leading chunks that need no store, because they are stored already


class Computing:
    """Chunks that are being computed and not stored yet. Requests that need one of them wait for it.

    A chunk is identified by its key in the first KV group that stores KV. A StoreJob copies chunks from the
    engine to the sidecar's memory. When the last StoreJob of a chunk ends, ``Stores`` calls ``end``.
    """

    def __init__(self) -> None:
        self._states: dict[RowKey, RequestState] = {}

    def get(self, key: RowKey) -> RequestState | None:
        """Return the request that computes the chunk."""
        return self._states.get(key)

    def begin(self, state: RequestState) -> None:
        """Record that the request computes its chunks that are not stored."""
        if state.is_exact:
            self._states |= dict.fromkeys(_chunks(state)[state.num_stored_chunks :], state)

    def end(self, state: RequestState, chunks: slice = slice(None)) -> None:
        """Record that the request no longer computes these chunks, or that they are stored."""
        for key in _chunks(state)[chunks]:
            if self._states.get(key) is state:
                del self._states[key]

    def clear(self) -> None:
        """Forget all chunks: no other request can use what is computed now."""
        self._states.clear()


def _chunks(state: RequestState) -> list[RowKey]:
    return state.ticket.keys[0] if state.ticket.keys else []
