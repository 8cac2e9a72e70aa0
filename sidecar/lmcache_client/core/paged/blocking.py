"""Access to the sidecar for an engine that looks up, loads and stores whole pages on threads of its own.

The engine names a page by a hash that covers all tokens up to the page's end. One page is one chunk of the
cache. The engine's threads may wait, but never longer than the limits. No method raises.

A lookup takes a lease, so that rows which were found stay in memory until the engine loads them. It also
makes the sidecar promote rows from lower tiers, and a load waits for these rows.

Lookups and loads name no request of the engine. The engine reports its requests separately (``report``).
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmcache_client.core.calls import Calls
from lmcache_client.core.copier import EngineCopier
from lmcache_client.core.hits import find_hit, words_of
from lmcache_client.core.jobs import EngineIdentity, GroupLoad, GroupStore, LoadJob, StoreJob
from lmcache_client.core.paged.page_requests import Lineage, PageRequest, PageRequests, row_keys
from lmcache_client.core.transfers import LoadTransfer, StoreTransfer
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarError
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import SidecarSession
from lmcache_client.rpc.times import RequestTimes
from lmcache_store.common.recent import Recent
from lmcache_store.common.timing import TIMING
from lmcache_store.kv_groups import first_needed_chunk
from lmcache_store.tiers.memory.contracts import LookupResult

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.002
_TICK_SECONDS = 0.5
_MAX_ENDED = 1024


@dataclass(frozen=True)
class Limits:
    """Longest times that the engine's threads wait, in seconds."""

    lookup_seconds: float = 0.25
    """A lookup waits for the answers of lower tiers."""
    row_seconds: float = 1.0
    """A load waits for the next row that the sidecar promotes."""
    load_seconds: float = 5.0
    """A load waits for all of its rows."""
    lease_seconds: float = 10.0
    """Rows stay leased after a lookup without a load."""


@dataclass(frozen=True)
class PagedRequest:
    """How the engine gets the KV of a prompt."""

    find_hashes: Callable[[], Sequence[bytes]]
    """Function that computes the hashes of the prompt's full pages. A thread of the cache calls it."""
    num_prompt_tokens: int
    num_engine_tokens: int
    """Leading tokens in the engine's own caches."""
    num_loaded_tokens: int
    """Tokens after these that the engine has loaded from this cache."""


class BlockingAccess:
    """Lookups, loads and stores of pages, see the module. All methods are thread-safe."""

    def __init__(
        self,
        client: SidecarClient,
        identity: EngineIdentity,
        copier: EngineCopier,
        limits: Limits,
        *,
        prefill_tokens_per_second: float = 0.0,
    ) -> None:
        """Use an attached worker's client; ``close`` closes it.

        Args:
            client: the client of this rank.
            identity: groups, sizes and namespace of the engine's KV.
            copier: copies between the arena and the engine's pages, which are its blocks.
            limits: longest waits.
            prefill_tokens_per_second: the engine's speed, with which loads are compared; 0.0: unknown.
        """
        self._client, self._copier, self._limits = client, copier, limits
        self._calls = Calls(client)
        self._grid = identity.grid
        self._page_tokens = identity.hello.chunk_tokens
        self._name = f"{identity.hello.column}-{secrets.token_hex(4)}-"  # ids must differ between attachments
        self.namespace_at_start = identity.hello.namespace
        self.engine_uuid = identity.hello.engine_uuid
        self._prefill_tokens_per_second = prefill_tokens_per_second
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # protects the next four
        self._namespace: bytes | None = identity.hello.namespace
        self._private_reason = ""  # why the namespace is private after a change; empty: as in the hello
        self._requests = PageRequests(limits.lease_seconds)
        self._lineage = Lineage()
        # By the hash of the first page; only the thread uses it.
        self._ended: Recent[bytes, PageRequest] = Recent(_MAX_ENDED)
        self._has_unsent_releases = False  # only the thread uses it
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lmcache-release", daemon=True)
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        """True if the client is attached to a sidecar."""
        return self._client.session is not None

    def set_namespace(self, namespace: bytes | None, private_reason: str = "") -> None:
        """Name all later lookups and stores differently; None: nothing is found or stored.

        ``private_reason``: why only this engine finds KV under the new name; empty: others find it, too.
        Loads of older lookups fail, even those that are running. Stores that are running end under the name
        with which they began.
        """
        with self._lock:
            self._namespace, self._private_reason = namespace, private_reason
            ended = self._requests.end_all()
        for request in ended:
            self._release(request)

    def report(self, request: PagedRequest) -> None:
        """Report a request that the engine begins to compute, for the sidecar's counts. Returns at once.

        Only one rank of an engine reports.
        """
        self._tasks.put(partial(self._report, request, time.monotonic() + TIMING.report_seconds))

    def count_hits(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading pages can be loaded, and lease them."""
        namespace = self._namespace
        session = self._client.session
        if namespace is None or session is None or not hashes:
            return 0
        request_id = f"{self._name}{next(self._numbers)}"
        request = PageRequest(request_id, namespace, tuple(hashes), self._grid.stored, time.monotonic())
        result = self._look_up(request)
        request.lookup_seconds = time.monotonic() - request.began_at
        # If the sidecar is silent, its index still shows the rows in memory.
        request.num_hits = result.num_expected if result else self._count_in_index(session, request)
        with self._lock:
            is_current = namespace == self._namespace
            if is_current and request.num_hits:
                self._requests.add(request)
        if not is_current:
            request.num_hits = 0
        if not request.num_hits:
            self._release(request)
        return request.num_hits

    def ends(self, hashes: Sequence[bytes], num_hits: int) -> list[int]:
        """Return all numbers of leading pages after which a request can resume, up to ``num_hits``.

        A window or a state needs the rows before such an end only. ``num_hits`` is always an end; the others
        are those that the rows in memory allow.
        """
        session, namespace = self._client.session, self._namespace
        if session is None or namespace is None or not num_hits:
            return [num_hits] if num_hits else []
        ends = set(range(1, num_hits))
        for group in self._grid.stored:
            words = words_of(row_keys(namespace, hashes[:num_hits], group.group))
            missing = np.cumsum(np.concatenate(([0], ~session.index.find_each(words).is_there)))
            first = partial(first_needed_chunk, group, chunk_tokens=self._page_tokens)
            ends = {end for end in ends if missing[end] == missing[first(end)]}
        return [*sorted(ends), num_hits]

    def load(
        self, group: int, hashes: Sequence[bytes], blocks: Sequence[int], began_at: float | None = None
    ) -> int:
        """Load pages into ``blocks``. Return how many leading pages were loaded.

        The contents of the other blocks are undefined. Several loads with one ``began_at``, a time of
        ``time.monotonic``, together wait no longer than one load. None: now.
        """
        namespace = self._namespace
        if namespace is None or not hashes:
            return 0
        with self._lock:
            request = self._requests.find(group, hashes[0], hashes[-1])
        if request is None or request.namespace != namespace:
            # The engine loads without a lookup, or its lookup was long ago.
            request_id, groups = f"{self._name}{next(self._numbers)}", self._grid.stored
            request = PageRequest(request_id, namespace, tuple(hashes), groups, time.monotonic())
            request.num_hits = len(hashes)
            with self._lock:
                self._requests.add(request)
        num_loaded = self._load(request, group, hashes, blocks, began_at)
        end = request.positions.get(hashes[0], 0) + num_loaded
        request.note_loaded(group, end)
        request.has_failed |= num_loaded < len(hashes)
        with self._lock:
            if request.is_over:
                self._requests.end(request)
            is_open = request in self._requests
        if not is_open:  # if it ended before, the load's own lookups may have taken the lease again
            self._release(request)
        return num_loaded if self._namespace == namespace else 0

    def store(
        self, group: int, hashes: Sequence[bytes], blocks: Sequence[int], prefix: Sequence[bytes] = ()
    ) -> bool:
        """Store pages from ``blocks``. Return True if all of them are cached now.

        ``prefix``: hashes of all pages before these. Eviction then begins with the last pages of a prompt.
        """
        namespace, session = self._namespace, self._calls.session
        if namespace is None or session is None or not hashes:
            return False
        with self._lock:
            chain = self._lineage.of(prefix, hashes)
        request_id = f"{self._name}chain-{chain}"
        keys = row_keys(namespace, hashes, group)
        job = StoreJob(0, request_id, (GroupStore(group, len(prefix), keys, tuple(blocks)),))
        transfer = StoreTransfer(job)
        self._copy_all(transfer, session, "store")
        return transfer.is_complete

    def close(self) -> None:
        """End all leases and detach. Waits at most some seconds."""
        self.set_namespace(None)
        self._tasks.put(None)
        self._thread.join(TIMING.close_seconds)
        self._client.close()
        self._copier.close()

    # ---- lookups and loads ----

    def _look_up(self, request: PageRequest) -> LookupResult | None:
        """Take the lease. Waits until lower tiers have said what they hold, within the limit."""
        deadline = request.began_at + self._limits.lookup_seconds
        while True:
            result = self._calls.attempt(partial(self._call_lookup, request))
            if result is None or not result.is_probing or time.monotonic() >= deadline:
                return result
            time.sleep(_POLL_SECONDS)

    def _call_lookup(self, request: PageRequest, session: SidecarSession) -> LookupResult:
        return session.lookup(
            request.request_id,
            request.keys,
            prefill_tokens_per_second=self._prefill_tokens_per_second,
            private_reason=self._private_reason,
            timeout=TIMING.lookup_seconds,
        )

    def _count_in_index(self, session: SidecarSession, request: PageRequest) -> int:
        words = [request.words[group.group] for group in self._grid.stored]
        return find_hit(session.index, self._grid, words).num_chunks

    def _load(
        self,
        request: PageRequest,
        group: int,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        began_at: float | None,
    ) -> int:
        """Copy rows in the order of the pages, as they arrive in memory."""
        began = progress_at = time.monotonic()
        num_loaded, copy_seconds, is_last_look = 0, 0.0, False
        words = words_of(row_keys(request.namespace, hashes, group))
        while (session := self._client.session) is not None and self._namespace == request.namespace:
            found = session.index.find(words[num_loaded:])
            looked_at = time.monotonic()
            if len(found.rows):
                part = tuple(blocks[num_loaded : num_loaded + len(found.rows)])
                num_copied = self._copy(
                    session, LoadJob(request.request_id, (GroupLoad(group, part, found),))
                )
                num_loaded += num_copied
                progress_at = time.monotonic()
                copy_seconds += progress_at - looked_at
                if num_copied < len(part):
                    break
            if num_loaded == len(hashes) or is_last_look or self._is_late(began_at or began, progress_at):
                break
            result = self._calls.attempt(partial(self._call_lookup, request))
            # Even if no row is pending, one more look at the index is due: a row may just have arrived.
            is_last_look = result is None or not (result.num_pending or result.is_probing)
            if not is_last_look:
                time.sleep(_POLL_SECONDS)
        request.load_seconds += copy_seconds
        request.wait_seconds += time.monotonic() - began - copy_seconds
        return num_loaded

    def _is_late(self, began: float, progress_at: float) -> bool:
        now = time.monotonic()
        return now - began >= self._limits.load_seconds or now - progress_at >= self._limits.row_seconds

    def _copy(self, session: SidecarSession, job: LoadJob) -> int:
        transfer = LoadTransfer(job, None)
        self._copy_all(transfer, session, "load")
        return len(job.blocks) - len(transfer.bad_blocks)

    def _copy_all(self, transfer: LoadTransfer | StoreTransfer, session: SidecarSession, what: str) -> None:
        try:
            transfer.run(session, self._copier)
        except SidecarError as error:
            logger.debug("A %s failed: %s", what, error)
        except Exception:
            logger.exception("A %s failed; later ones go on", what)

    # ---- leases and reports, on the thread ----

    def _release(self, request: PageRequest) -> None:
        self._tasks.put(partial(self._end_lease, request))

    def _run(self) -> None:
        expires_at = time.monotonic() + _TICK_SECONDS
        while True:
            try:
                task = self._tasks.get(timeout=max(0.0, expires_at - time.monotonic()))
            except queue.Empty:
                task, expires_at = self._tick, time.monotonic() + _TICK_SECONDS
            if task is None:
                return
            try:
                task()
            except Exception:
                logger.exception("Releasing or reporting a lookup failed; later ones go on")

    def _tick(self) -> None:
        """End expired requests, and repeat releases that the sidecar did not answer."""
        with self._lock:
            expired = self._requests.end_expired(time.monotonic())
        for request in expired:
            self._end_lease(request)
        if self._has_unsent_releases:
            self._send_releases()

    def _end_lease(self, request: PageRequest) -> None:
        self._ended[request.hashes[0]] = request
        self._client.release_later(request.request_id)  # stays pending if the sidecar does not answer
        self._send_releases()

    def _send_releases(self) -> None:
        def send(session: SidecarSession) -> bool:
            session.release([], timeout=TIMING.lookup_seconds)  # sends all that are pending
            return True

        self._has_unsent_releases = not self._calls.attempt(send)

    def _report(self, request: PagedRequest, deadline: float) -> None:
        # Calls pause after a slow one. On a busy machine, the reports of that time would be lost.
        session = self._calls.wait(deadline)
        hashes, namespace = request.find_hashes(), self._namespace
        left = deadline - time.monotonic()
        if namespace is None or session is None or left <= 0:
            return
        size = self._page_tokens
        num_hits = request.num_engine_tokens + request.num_loaded_tokens
        # The sidecar knows this request by another id than that of its lookups, which named no request.
        request_id = f"{self._name}request-{next(self._numbers)}"
        keys = [(group.group, row_keys(namespace, hashes, group.group)) for group in self._grid.stored]
        scheduled = Scheduled(
            num_engine_chunks=min(request.num_engine_tokens // size, len(hashes)),
            num_hit_chunks=min(num_hits // size, len(hashes)),
            num_loaded_tokens=request.num_loaded_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_engine_tokens=request.num_engine_tokens,
            block_tokens=size,
            reports_times=True,
        )
        reason = self._private_reason
        self._calls.attempt(
            lambda session: session.lookup(
                request_id, keys, hint=True, scheduled=scheduled, private_reason=reason, timeout=left
            )
        )
        times = self._times(request_id, hashes)
        self._calls.attempt(lambda session: session.release([], TIMING.lookup_seconds, [times]))

    def _times(self, request_id: str, hashes: Sequence[bytes]) -> RequestTimes:
        """Return the times of the lookups and loads of these pages that ended since the last report."""
        ended = [found for page_hash in hashes if (found := self._ended.pop(page_hash, None)) is not None]
        return RequestTimes(
            request_id,
            sum(request.lookup_seconds for request in ended),
            sum(request.wait_seconds for request in ended),
            sum(request.load_seconds for request in ended),
        )
