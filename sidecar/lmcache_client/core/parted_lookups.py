"""Finds the hits of an engine of several parts (``parts``): leading chunks that all parts have.

**Presence.** The scheduler side remembers which rows the other parts have. It learns this from their answers
to hints, and from stores that all ranks completed. A request waits for an answer only while part 0 has chunks
that another part is not known to have. A part that does not answer for some time is **silent**: it counts as
empty, except for rows that it is known to have, and no request waits for it until it answers again.

The other parts evict rows at any time, so presence may be wrong. The load of an evicted row fails, because
each rank proves its bytes. The engine then computes, and the scheduler side forgets what it knew of these
chunks.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from lmcache_client.core.hits import Hit, find_hit, no_hit, words_of
from lmcache_client.core.jobs import EngineIdentity, StepMeta, StoreJob, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parts import End, Hint, Lease, PartAnswer, PartedIdentity, PartedReport, PartedStep
from lmcache_client.core.presence import JointIndex, Presence, chunk_keys, named
from lmcache_client.core.requests import RequestState, Ticket
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.service import MAX_REQUEST_ID_BYTES
from lmcache_store import keys
from lmcache_store.common.recent import Recent
from lmcache_store.common.timing import TIMING
from lmcache_store.common.units import ceil_div
from lmcache_store.kv_groups import first_needed_chunk
from lmcache_store.tiers.base import KEY_BYTES
from lmcache_store.tiers.memory.contracts import LookupResult

logger = logging.getLogger(__name__)

ANSWER_OUTPUTS = 3
"""Outputs of steps, from the hint's step on, after which a part that has not answered is silent.
``part_seconds`` must have passed, too, because a single step may take long."""

MAX_RELAY_BYTES = 64 << 10
"""Largest size of the relays in the message of one step."""

Moment = tuple[float, float]
"""A time, and the number of outputs of steps until then."""

_LONG_AGO: Moment = (-math.inf, -math.inf)

_MAX_TENANTS = 1 << 16

_RELAY_BYTES = 256
"""Largest size of a relay without its texts and keys."""


def start_lookups(client: SidecarClient, identity: EngineIdentity, *settings: Any) -> LookupThread:
    """Start the lookup thread of an engine. ``settings``: see ``LookupThread``."""
    if isinstance(identity, PartedIdentity):
        return PartedLookups(client, identity, *settings)
    return LookupThread(client, identity, *settings)


@dataclass(eq=False)
class _Request:
    """Calls to the other parts for one ticket, and their answers."""

    ticket: Ticket
    known: int = -1
    """Bit mask of the parts that are known to have the chunks of part 0's hit, at the last lookup."""
    num_local: int = 0
    """Chunks of part 0's hit at that time."""
    num_hit: int = 0
    """Chunks of the hit of all parts at that time."""
    asked: Moment = _LONG_AGO
    """Moment when the last hint was queued or, later, relayed."""
    first_asked: Moment = _LONG_AGO
    """The same of the first hint of a close sequence, to which the last hint also belongs."""
    stored: Moment | None = None
    """Moment when only part 0 was first found to have another request's chunk."""
    number: int = 0
    """Number of the last hint that was relayed; 0: none."""
    num_sent: int = 0
    """Chunks whose keys were relayed."""
    num_leased: int | None = None
    """Chunks to lease when all keys were relayed; None: not known yet. With 0, the hint only marks rows as
    used, because the engine has their KV itself."""
    answers: dict[int, PartAnswer] = field(default_factory=dict)
    """Last answers of the parts to any hint."""

    @property
    def has_keys(self) -> bool:
        """True if all keys were relayed."""
        return self.num_sent == len(self.ticket.hashes)

    def is_answered(self, part: int) -> bool:
        """Return True if the part answered the last hint."""
        return part in self.answers and self.answers[part].number == self.number and self.has_keys


class PartedLookups(LookupThread):
    """The lookups of an engine of several parts, see the module. Only the base class uses the thread."""

    def __init__(self, client: SidecarClient, identity: PartedIdentity, *settings: Any) -> None:
        """See ``LookupThread``."""
        self._parts = range(1, identity.num_parts)
        self._num_ranks = identity.num_ranks
        self._answer_outputs = ANSWER_OUTPUTS + identity.num_batches - 1  # those of earlier steps come first
        self._num_outputs = 0
        self._num_hints = 0
        self._silent: set[int] = set()
        self._presence = Presence(identity.num_parts)
        self._salts: Recent[bytes, bytes] = Recent(_MAX_TENANTS)  # tenant -> ``keys.salt_hash``
        self._requests: dict[str, _Request] = {}
        self._hinted: dict[_Request, None] = {}  # requests whose hints wait to be relayed, in order
        self._first: deque[Lease | End] = deque()  # precede the hints in a message
        self._stores: dict[int, StoreJob] = {}  # by job id, until a part lacks rows or all ranks ended it
        self._num_ended: Counter[int] = Counter()  # job id -> ranks that ended it
        super().__init__(client, identity, *settings)

    def find(self, ticket: Ticket, at_least: int = 0) -> Hit | None:
        """Find the longest hit in the memory of all parts, see ``LookupThread``."""
        hit = super().find(ticket, at_least)
        if hit is None:
            return None
        index, known, num_local = self.index, self._presence.all_parts, hit.num_chunks
        if index is None:  # the client has just detached
            hit, num_local = no_hit(self._grid), 0
        elif num_local:
            known = self._known(ticket, num_local, at_least)
            if known != self._presence.all_parts:
                joint = JointIndex(index, self._presence, at_least)
                hit = find_hit(joint, self._grid, ticket.words, at_least)
            rows = zip(hit.found, ticket.words, strict=True)
            hit = hit._replace(found=tuple(named(found, words, ticket.namespace) for found, words in rows))
        if request := self._get(ticket):
            request.known, request.num_local, request.num_hit = known, num_local, hit.num_chunks
        return hit

    def knows_all(self, ticket: Ticket) -> bool:
        """Return True if no answer could show more rows of all parts."""
        request = self._get(ticket)
        is_complete = request is None or request.num_hit == request.num_local
        return is_complete and super().knows_all(ticket)

    def answer_to(self, ticket: Ticket) -> LookupResult | None:
        """Return the joint answer of all parts; None: a needed one is outstanding."""
        answer, request = ticket.answer, self._get(ticket)
        if answer is None or request is None:
            return answer
        if self._awaits(request):
            return None
        num_hit = request.num_hit
        expected = [(max(answer.num_expected, request.num_local), answer.is_probing)]
        for part in self._parts:
            of_part = request.answers.get(part)
            if part in self._silent or not (of_part or request.known >> part & 1):
                return LookupResult(num_hit)
            if of_part:
                is_probing = of_part.is_probing and not self._is_past(request.first_asked)
                expected.append((of_part.num_expected, is_probing))
        # A part that is not probing, and expects no more, ends the wait for all others.
        can_grow = all(is_probing or number > num_hit for number, is_probing in expected)
        num_expected = max(num_hit, min(number for number, _ in expected))
        is_probing = can_grow and any(is_probing for _, is_probing in expected)
        return LookupResult(num_hit, 0, num_expected - num_hit, is_probing)

    def is_late(self, ticket: Ticket, missing_seconds: float) -> bool:
        """Return True if no answer is awaited any more, see ``LookupThread``."""
        request = self._get(ticket)
        return not (request and self._awaits(request)) and super().is_late(ticket, missing_seconds)

    def is_store_late(self, ticket: Ticket, chunk: int, other: RequestState) -> bool:
        """Return True if another part had enough time to store a chunk that part 0 has."""
        request, index = self._get(ticket), self.index
        if request is None or index is None:
            return False
        has_begun = chunk < other.num_stored_chunks  # part 0 may have the chunk of an earlier request
        is_there = has_begun and index.find_each(ticket.words[0][chunk : chunk + 1]).is_there.all()
        request.stored = (request.stored or self._now()) if is_there else None
        return request.stored is not None and self._is_past(request.stored)

    def ask(self, ticket: Ticket) -> None:
        """Send a hint to the sidecars of all parts, unless an answer is outstanding."""
        super().ask(ticket)
        if ticket.tenant:
            self._salts[ticket.tenant] = keys.salt_hash(ticket.cache_salt)
        is_refused = _size(ticket.request_id) > _RELAY_BYTES + MAX_REQUEST_ID_BYTES  # by the sidecars
        if is_refused or not (ticket.is_read and ticket.hashes):
            return
        request = self._requests.get(ticket.request_id)
        if request is None or request.ticket is not ticket:
            if request is not None:  # it starts again
                self.end(request.ticket)
            request = self._requests[ticket.request_id] = _Request(ticket)
        elif request in self._hinted or self._unanswered(request):
            return
        self._hinted[request], now = None, self._now()
        if self._is_past(request.asked):
            request.first_asked = now
        request.asked = now

    def note_scheduled(self, state: RequestState, num_tokens: int = 0) -> None:
        """Take leases of a load from all parts, or end the request's calls."""
        super().note_scheduled(state, num_tokens)
        ticket, request = state.ticket, self._get(state.ticket)
        num_chunks, _ = self._unleased.get(ticket, (0, None))
        if request is None or (not num_chunks and (request.number or not request.num_local)):
            self.end(ticket)
        elif request.has_keys:
            self._first.append(Lease(ticket.request_id, num_chunks))
        else:
            request.num_leased = num_chunks

    def release(self, ticket: Ticket) -> None:
        """End the ticket's leases. Call this when its load has ended."""
        super().release(ticket)
        self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        """End all calls to other parts for the ticket."""
        if request := self._get(ticket):
            del self._requests[ticket.request_id]
            self._hinted.pop(request, None)
            if request.number:
                self._first.append(End(ticket.request_id))

    def end_step(self, meta: StepMeta) -> StepMeta:
        """Return the step's message with the calls to other parts."""
        self._stores |= {job.job_id: job for job in meta.stores}
        salts = {job.tenant: self._salts[job.tenant] for job in meta.stores if job.tenant in self._salts}
        relays = self._take_relays()
        return PartedStep(**vars(meta), relays=relays, salts=salts) if relays or salts else meta

    def note_output(self, report: object) -> None:
        """Record the output of a step: answers, completed stores and failed loads."""
        self._num_outputs += 1
        if not isinstance(report, WorkerReport):
            return
        if isinstance(report, PartedReport):
            for request_id, answers in report.answers.items():
                for part, answer in answers.items():
                    self._take_answer(request_id, part, answer)
            for job_id in report.incomplete:
                self._stores.pop(job_id, None)
        self._num_ended.update(report.stores_ended)
        for job_id in [
            job_id for job_id in report.stores_ended if self._num_ended[job_id] >= self._num_ranks
        ]:
            del self._num_ended[job_id]
            if job := self._stores.pop(job_id, None):
                for group in job.groups:
                    self._presence.add(words_of(group.keys))
        for request in map(self._requests.get, report.failed_loads):
            for words in request.ticket.words if request is not None else ():
                self._presence.forget(words)

    def _get(self, ticket: Ticket) -> _Request | None:
        request = self._requests.get(ticket.request_id)
        return request if request is not None and request.ticket is ticket else None

    def _known(self, ticket: Ticket, num_chunks: int, num_held: int) -> int:
        """Return the bit mask of the parts that are known to have all rows of a hit.

        ``num_held``: leading chunks that the engine itself has.
        """
        groups, chunk_tokens = self._grid.stored, self._grid.chunk_tokens
        firsts = (max(num_held, first_needed_chunk(group, num_chunks, chunk_tokens)) for group in groups)
        return self._presence.common(
            words[first:num_chunks] for first, words in zip(firsts, ticket.words, strict=True)
        )

    def _now(self) -> Moment:
        return self._clock(), self._num_outputs

    def _is_past(self, moment: Moment) -> bool:
        """Return True if a part had enough time to answer since this moment."""
        seconds, num_outputs = self._clock() - moment[0], self._num_outputs - moment[1]
        return num_outputs >= self._answer_outputs and seconds >= TIMING.part_seconds

    def _unanswered(self, request: _Request) -> list[int]:
        """Return the parts that may soon answer the last hint. Parts that are late become silent."""
        parts = [part for part in self._parts if part not in self._silent and not request.is_answered(part)]
        if not parts or not self._is_past(request.asked):
            return parts
        if request.number:  # otherwise, the hint did not fit in any step yet
            silent = ", ".join(map(str, parts))
            logger.info("No request waits for part %s, silent for %s s", silent, TIMING.part_seconds)
            self._silent.update(parts)
        return []

    def _awaits(self, request: _Request) -> bool:
        """Return True if a part may soon answer that it has more of part 0's hit."""
        parts = [part for part in self._unanswered(request) if not request.known >> part & 1]
        return bool(parts) and not self._is_past(request.first_asked)  # repeated hints do not prolong it

    def _take_answer(self, request_id: str, part: int, answer: PartAnswer) -> None:
        """Record an answer of a part. Ignores answers to earlier hints, and of unknown parts."""
        if part not in self._parts:
            return
        self._silent.discard(part)
        request = self._requests.get(request_id)
        if request is None or answer.number != request.number:
            return
        words, num_bytes = request.ticket.words, ceil_div(request.num_sent, 8)
        if [len(bits) for bits in answer.residency] != [num_bytes] * len(words):
            return
        request.answers[part] = answer
        for row_words, bits in zip(words, answer.residency, strict=True):
            self._presence.take(part, row_words[: request.num_sent], bits)

    def _take_relays(self) -> list[Hint | Lease | End]:
        """Take the relays of one step: as many as its message can have."""
        relays: list[Hint | Lease | End] = []
        num_free = MAX_RELAY_BYTES
        while self._first:
            num_free -= _size(self._first[0].request_id)
            if num_free < 0 and relays:
                return relays
            relays.append(self._first.popleft())
        # Requests that wait come first.
        for request in sorted(self._hinted, key=lambda request: request.num_leased == 0):
            ticket, first = request.ticket, request.num_sent
            if ticket.keys is None:  # its keys are still being computed
                continue
            if not ticket.keys[0]:  # it can't be cached
                self.end(ticket)
                continue
            # A lease or an end may follow the hint.
            num_free -= _size(ticket.request_id, self.private_reason) + _size(ticket.request_id)
            num_fitting = num_free // (KEY_BYTES * len(ticket.words))
            if num_fitting <= 0 and relays:
                break
            end = min(first + max(num_fitting, 1), len(ticket.hashes))
            num_free -= (end - first) * KEY_BYTES * len(ticket.words)
            relays.append(self._next_hint(request, end))
            if end < len(ticket.hashes):
                break
            del self._hinted[request]
            if request.num_leased:
                relays.append(Lease(ticket.request_id, request.num_leased))
            elif request.num_leased is not None:
                del self._requests[ticket.request_id]
                relays.append(End(ticket.request_id))
        return relays

    def _next_hint(self, request: _Request, end: int) -> Hint:
        """Create the request's next hint, with the keys that were not relayed of the first ``end`` chunks."""
        ticket, first = request.ticket, request.num_sent
        self._num_hints += 1
        request.number, request.num_sent = self._num_hints, end
        request.asked = self._now()
        if first < end:
            request.first_asked = request.asked
        return Hint(
            ticket.request_id,
            request.number,
            ticket.namespace,
            tuple(chunk_keys(words[first:end]) for words in ticket.words) if first < end else (),
            first,
            keys.salt_hash(ticket.cache_salt) if ticket.tenant else b"",
            self._rate.tokens_per_second,
            self.private_reason,
            ticket.num_handed_over,
        )


def _size(request_id: str, text: str = "") -> int:
    return _RELAY_BYTES + len((request_id + text).encode("utf-8", "surrogatepass"))
