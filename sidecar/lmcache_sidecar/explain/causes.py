"""Causes: one for each token of a prompt, for all requests and for each recent one.

::

    0 ............ position ............. known .............. chunks .............. prompt
      engine, or     reason why the         new, or diverged     tail: less than a
      loaded         first chunk after      from an earlier      chunk, or the last
                     the hit was no hit     prompt               token

A chunk can only be used if all chunks before it can. The reason of the first chunk that an earlier request
looked up, and that was not a hit, therefore applies to all chunks after it that earlier requests looked up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.explain.benefit_stats import BenefitStats
from lmcache_sidecar.explain.open_requests import EndedRequest, OpenRequests
from lmcache_sidecar.explain.request_times import RequestHistograms
from lmcache_sidecar.explain.requests import BLENDED, UNKNOWN_ENGINE, ExplainedRequest, RequestEngine
from lmcache_sidecar.explain.sources import loaded_tokens
from lmcache_store.tenant_names import DEFAULT_NAME
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.stats import counter, counters
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import ChunkHistory, Names, chunk_names

NEW, DIVERGED, TAIL, NOT_CACHEABLE = "new", "diverged", "tail", "not_cacheable"
_DEPTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MAX_REQUESTS = 1000
_DEFER_SECONDS = 0.02
_STORING_SECONDS = 60.0
"""Time in which an engine computes and stores a chunk that it looked up."""
_SLICE_CHUNKS, _REQUEST_CHUNKS = 1024, 64
"""Chunks to count before other tasks run, in about 1 ms. A request costs as much as 64 chunks."""
_END_CHUNKS = 16
"""Cost of the end of a request."""
_MAX_BRANCHES = 256


@dataclass
class Branch:
    """A common prefix after which prompts differ."""

    prefix: str
    """Hash of the prefix."""
    depth_tokens: int
    """Tokens of the prefix, at least."""
    num_requests: int = 0
    """Requests that left earlier prompts here."""
    num_tokens: int = 0
    """Tokens that they computed after it."""


class Branches:
    """The branches with the most computed tokens. The number of branches is bounded."""

    def __init__(self) -> None:
        self._by_name: dict[int, Branch] = {}

    def note(self, name: int, depth_tokens: int, num_tokens: int) -> None:
        """Count a request that leaves earlier prompts after this prefix."""
        branch = self._by_name.get(name)
        if branch is None:
            if len(self._by_name) >= _MAX_BRANCHES:
                largest = self.top(_MAX_BRANCHES // 2)
                self._by_name = {int(branch.prefix, 16): branch for branch in largest}
            branch = self._by_name[name] = Branch(f"{name:016x}", depth_tokens)
        branch.num_requests += 1
        branch.num_tokens += num_tokens

    def top(self, number: int) -> Sequence[Branch]:
        """Return the branches with the most computed tokens, the largest first."""
        return sorted(self._by_name.values(), key=lambda branch: -branch.num_tokens)[:number]


@dataclass
class CauseStats:
    """Counters of the tokens of all prompts."""

    prompt_tokens: int = counter("Tokens of prompts that engines scheduled")
    cause_tokens: Counter[str] = counters(
        "cause", "The same tokens, by where they were found, or by the reason why they were computed"
    )
    diverged_requests: Counter[str] = counters(
        "depth", "Requests that left an earlier prompt, by the common tokens: at most this number"
    )
    diverged_tokens: Counter[str] = counters("depth", "Tokens computed by these requests after that point")

    def count(self, tokens: Mapping[str, int]) -> None:
        """Count the tokens of a prompt by cause."""
        self.prompt_tokens += sum(tokens.values())
        self.cause_tokens.update(tokens)

    def note_divergence(self, depth: int, num_tokens: int) -> None:
        """Count a request that left an earlier prompt after ``depth`` tokens, and computed ``num_tokens``."""
        number = bisect_left(_DEPTHS, depth)
        label = str(_DEPTHS[number]) if number < len(_DEPTHS) else "more"
        self.diverged_requests[label] += 1
        self.diverged_tokens[label] += num_tokens


class Blocking(NamedTuple):
    """Why the first chunk after the hit was not one."""

    absence: Absence
    is_unstored: bool = False
    """True if no KV group has, or had, a row of that chunk: an engine may still compute it."""


_NO_CHUNK = Blocking(Absence.BEING_STORED)


class UncountedRequest(NamedTuple):
    """A request whose causes are not counted yet."""

    time: float
    request_id: str
    chains: Chains
    message: pb.Scheduled
    sources: bytes
    history: ChunkHistory
    blocking: Blocking
    """Reason why the first chunk after the hit was not one, if an earlier request looked it up."""
    engine: RequestEngine = UNKNOWN_ENGINE
    tenant: str = DEFAULT_NAME
    """Name of the budget of the request's tenant."""
    late_blocking: asyncio.Future[Blocking] | None = None
    """The same reason once lower tiers have answered; None: none of them was being asked."""


def call_later(seconds: float, action: Callable[[], None]) -> None:
    """Call a function on the running loop."""
    asyncio.get_running_loop().call_later(seconds, action)


class Causes:
    """Finds the causes of each scheduled request. The event loop owns it.

    ``note`` is on the hot path and only queues the request. The rest follows in slices.
    """

    def __init__(self, defer: Callable[[float, Callable[[], None]], object] = call_later) -> None:
        """``defer``: calls a function after some seconds, but not at once."""
        self.stats = CauseStats()
        self.by_tenant: defaultdict[str, CauseStats] = defaultdict(CauseStats)
        """The same counters by the name of the tenants' budget."""
        self.uncached_reason = ""
        """Why the last request without keys has none; empty: no engine gave a reason."""
        self.benefit = BenefitStats()
        self.times = RequestHistograms()
        self.branches = Branches()
        self.requests: deque[ExplainedRequest] = deque(maxlen=_MAX_REQUESTS)
        """Recent requests, the newest last."""
        self.open_requests = OpenRequests(self._count)
        self._defer = defer
        self._queue: deque[UncountedRequest | EndedRequest] = deque()

    def note(self, request: UncountedRequest | EndedRequest) -> None:
        """Queue a request, or the end of one that was queued before."""
        self._queue.append(request)
        if len(self._queue) == 1:
            self._defer(_DEFER_SECONDS, self._settle_slice)  # after calls that arrived together

    def settle(self) -> None:
        """Count the queued requests, up to one about which lower tiers are being asked."""
        while self._is_next_ready:
            self._take(self._queue.popleft())

    def end_engine(self, engine: bytes) -> None:
        """Count the loads of an engine that is dead. They count as hits."""
        while self._queue:
            self._take(self._queue.popleft())
        self.open_requests.end_engine(engine)

    @property
    def _is_next_ready(self) -> bool:
        """Is a request queued, and does no answer of a lower tier decide its causes?"""
        if not self._queue or isinstance(self._queue[0], EndedRequest):
            return bool(self._queue)
        late = self._queue[0].late_blocking
        return late is None or late.done()

    def _settle_slice(self) -> None:
        num_left = _SLICE_CHUNKS
        try:
            while num_left > 0 and self._is_next_ready:
                num_left -= self._take(self._queue.popleft())
        finally:
            if self._queue:  # requests that are ready without a pause, so that any rate is counted
                self._defer(0.0 if self._is_next_ready else _DEFER_SECONDS, self._settle_slice)

    def _take(self, request: UncountedRequest | EndedRequest) -> int:
        """Process a queued request. Returns its cost in chunks."""
        if isinstance(request, EndedRequest):
            if (explained := self.open_requests.end(request)) is not None:
                self.times.observe(explained)
                self.benefit.note_first_token(explained)
            return _END_CHUNKS
        self._explain(request)
        return _REQUEST_CHUNKS + request.chains.num_chunks

    def _explain(self, request: UncountedRequest) -> None:
        chains, message, sources = request.chains, request.message, request.sources
        blocking, late = request.blocking, request.late_blocking
        if late is not None and late.done() and not late.cancelled():
            blocking = late.result()
        chunk, num_chunks, num_hit = chains.chunk_tokens, chains.num_chunks, len(request.sources)
        num_prompt = max(message.num_prompt_tokens, num_chunks * chunk)  # an older engine sends 0
        num_engine = min(message.num_engine_tokens or sources.count(b"e") * chunk, num_prompt)
        num_loaded = min(message.num_loaded_tokens, num_prompt - num_engine)
        tokens = Counter(engine=num_engine, **loaded_tokens(sources, num_loaded, chunk))
        position = depth = num_engine + num_loaded
        tokens["memory"] += position - tokens.total()  # of chunks for which the lookup had no keys
        # Documents are the first tokens after the hit. What the engine computes comes behind them, or is few.
        tokens[BLENDED] = min(message.num_blended_tokens, num_prompt - position)
        position += tokens[BLENDED]
        if num_chunks:
            blocks = _first_block_names(message.first_blocks, chains.keys[0][0])
            chain = np.concatenate((blocks, chunk_names(list(chains.keys[0]))))
            before = len(blocks) if num_hit else 0
            past = request.history.observe(
                chain, before + sources.count(b"e"), before + num_hit, request.time, len(blocks)
            )
            num_known = max(0, past.num_known - len(blocks))
            depth = max(depth, num_known * chunk or min(past.num_known * message.block_tokens, chunk))
            if num_known > num_hit:
                first_seconds = request.history.first_seconds(chain[len(blocks) + num_hit :])
                is_recent = request.time - first_seconds < _STORING_SECONDS
                is_storing = is_recent and blocking.is_unstored
                absence = Absence.BEING_STORED if is_storing else blocking.absence
                tokens[absence.value] = max(0, num_known * chunk - max(position, num_hit * chunk))
            num_new = max(0, num_chunks * chunk - max(position, num_known * chunk))
            tokens[DIVERGED if past.has_diverged else NEW] = num_new
            if past.has_diverged:
                self._note_divergence(request.tenant, int(chain[past.num_known - 1]), depth, num_new)
        rest = num_prompt - sum(tokens.values())
        tokens[TAIL if num_chunks or num_prompt <= chunk else NOT_CACHEABLE] = rest
        present = {cause: number for cause, number in tokens.items() if number}
        explained = ExplainedRequest(
            request.time,
            request.request_id,
            present,
            depth,
            request.engine,
            request.tenant,
            message.uncached_reason,
        )
        self.uncached_reason = message.uncached_reason or self.uncached_reason
        self.requests.append(explained)
        if message.reports_times:
            self.open_requests.add(explained)
        if not (message.reports_times and explained.load_tier):
            self._count(explained)

    def _count(self, request: ExplainedRequest) -> None:
        """Count a request's tokens, once. The causes of a load are known when it has ended."""
        request.is_counted = True
        for stats in (self.stats, self.by_tenant[request.tenant]):
            stats.count(request.tokens)
        self.benefit.count(request)

    def _note_divergence(self, tenant: str, prefix: int, depth: int, num_tokens: int) -> None:
        for stats in (self.stats, self.by_tenant[tenant]):
            stats.note_divergence(depth, num_tokens)
        self.branches.note(prefix, depth, num_tokens)


def find_blocking(
    chains: Chains,
    num_hit: int,
    request: str,
    absence: Callable[[RowKey, str], Absence],
    is_stored: Callable[[RowKey], bool],
) -> Blocking:
    """Return why the first chunk after the hit was not one: the reason of the first KV group that lacked it.

    A row that arrives late does not decide if another group has none. ``absence`` says why a row is not in
    memory, and ``is_stored`` whether it ever was in a tier. Call this with the report, because the request
    stores the chunk itself soon.
    """
    if num_hit >= chains.num_chunks:
        return _NO_CHUNK
    if len(chains.keys) == 1:  # most models: a row that is NOT_STORED never was in a tier
        reason = absence(chains.keys[0][num_hit], request)
        return Blocking(reason, reason is Absence.NOT_STORED)
    keys = [chain[num_hit] for chain in chains.keys]
    reasons = [absence(key, request) for key in keys]
    arriving = Absence.TOO_LATE if Absence.TOO_LATE in reasons else Absence.BEING_STORED
    decisive = (reason for reason in reasons if reason not in (arriving, Absence.BEING_STORED))
    blocking = next(decisive, arriving)
    return Blocking(blocking, blocking is Absence.NOT_STORED and not any(map(is_stored, keys)))


def _first_block_names(first_blocks: bytes, key: RowKey) -> Names:
    """Return the names of the engine's blocks in the first chunk, without the last block.

    ``first_blocks``: see ``Scheduled`` in kvcache.proto. ``key``: the first chunk's key.
    """
    names: Names = np.frombuffer(first_blocks, "<u8") ^ np.frombuffer(key[:8], "<u8")
    return names
