"""Requests of an engine that looks up pages by their hashes and names no request. Pure.

The engine asks which leading pages of a prompt are cached, and later loads pages by hash, in any number of
calls. It may also never load them. So each lookup opens a ``PageRequest``, whose rows are leased. The request
ends when its pages are loaded, when a load fails, or after a time limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lmcache_client.core.hits import KeyWords, words_of
from lmcache_store import keys
from lmcache_store.common.recent import Recent
from lmcache_store.kv_groups import KVGroup

_MAX_CHAINS = 8192


@dataclass(eq=False)
class PageRequest:
    """One lookup of leading pages, and the loads that follow it."""

    request_id: str
    namespace: bytes
    hashes: tuple[bytes, ...]
    """Hashes of the pages to look up. Each covers all tokens up to the page's end."""
    groups: tuple[KVGroup, ...]
    """KV groups that store rows."""
    began_at: float
    num_hits: int = 0
    """Leading pages that the engine was told are cached."""
    lookup_seconds: float = 0.0
    wait_seconds: float = 0.0
    load_seconds: float = 0.0
    has_failed: bool = False
    loaded: dict[int, int] = field(default_factory=dict)
    """Leading pages up to the last page that was loaded, by KV group."""

    @cached_property
    def keys(self) -> list[tuple[int, bytes]]:
        """(KV group, joined row keys of all pages), as ``SidecarSession.lookup`` takes them."""
        return [(group.group, row_keys(self.namespace, self.hashes, group.group)) for group in self.groups]

    @cached_property
    def words(self) -> dict[int, KeyWords]:
        """Row keys as numbers ``[pages, 8]`` by KV group, for lookups in the arena's index."""
        return {group: words_of(joined) for group, joined in self.keys}

    @cached_property
    def positions(self) -> dict[bytes, int]:
        """Position of each page by its hash."""
        return {page_hash: position for position, page_hash in enumerate(self.hashes)}

    def needs(self, group: int, page_hash: bytes) -> bool:
        """Return True if this page was found, and neither it nor a later page was loaded."""
        return self.loaded.get(group, 0) <= self.positions.get(page_hash, self.num_hits) < self.num_hits

    def note_loaded(self, group: int, end: int) -> None:
        """Record that pages up to position ``end`` were loaded."""
        self.loaded[group] = max(end, self.loaded.get(group, 0))

    @property
    def is_over(self) -> bool:
        """True if nothing more will be loaded."""
        return self.has_failed or all(
            self.loaded.get(group.group, 0) >= self.num_hits for group in self.groups
        )


class PageRequests:
    """Open requests, in the order of their lookups. An engine loads in this order, too."""

    def __init__(self, limit_seconds: float) -> None:
        """``limit_seconds``: time after which a request ends, because the engine dropped it silently."""
        self._limit_seconds = limit_seconds
        self._open: dict[PageRequest, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: PageRequest) -> bool:
        return request in self._open

    def add(self, request: PageRequest) -> None:
        """Open a request."""
        self._open[request] = None

    def find(self, group: int, page_hash: bytes, last_hash: bytes | None = None) -> PageRequest | None:
        """Return the oldest open request for which this page was not loaded yet.

        Prefers a request that also found ``last_hash``, the last page of the load. The engine may have
        dropped an older lookup with a shorter hit, for which the sidecar does not promote the later pages.
        """
        found = [request for request in self._open if request.needs(group, page_hash)]
        longer = (request for request in found if last_hash is None or request.needs(group, last_hash))
        return next(longer, found[0] if found else None)

    def end(self, request: PageRequest) -> None:
        """Close a request, unless it was closed before."""
        self._open.pop(request, None)

    def end_expired(self, now: float) -> list[PageRequest]:
        """Close and return the requests that the engine has not loaded in time."""
        expired = [request for request in self._open if request.began_at + self._limit_seconds <= now]
        for request in expired:
            del self._open[request]
        return expired

    def end_all(self) -> list[PageRequest]:
        """Close and return all requests."""
        requests = list(self._open)
        self._open.clear()
        return requests


def row_keys(namespace: bytes, hashes: Sequence[bytes], group: int) -> bytes:
    """Return the row keys of pages in one KV group, joined."""
    return b"".join(namespace + key for key in keys.chunk_keys(hashes, group=group))


class Lineage:
    """Gives a store the name of the store whose pages come directly before its own.

    The memory tier evicts the rows of one name from their end, so that the head of a prompt is evicted last.
    """

    def __init__(self) -> None:
        self._chains: Recent[bytes, int] = Recent(_MAX_CHAINS)  # by the hash of the chain's last page
        self._numbers = itertools.count()

    def of(self, prefix: Sequence[bytes], hashes: Sequence[bytes]) -> int:
        """Return the number of the chain that these pages continue, or a new number."""
        number = self._chains.get(prefix[-1]) if prefix else None
        if number is None:
            number = next(self._numbers)
        self._chains[hashes[-1]] = number
        return number
