"""Calls the sidecar of a part for the scheduler side, which is on another node.

The calls arrive in the messages of steps, in the order of their events. The speaker reports the rows of a
hinted request in the same step, because it reads them from the index in shared memory. It reports them again
when the sidecar has answered, and when rows arrive. The sidecar gets the same calls as that of part 0, so
that both evict the same rows. It counts no hits and misses for them, because part 0 does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmcache_client.core.hits import words_of
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parts import Hint, Lease, PartAnswer, PartedIdentity, PartNames, Relay, row_keys
from lmcache_client.core.requests import Ticket
from lmcache_client.core.waiting import PrefillRate
from lmcache_client.rpc.client import SidecarClient
from lmcache_store.kv_groups import first_needed_chunk, longest_hit
from lmcache_store.tiers.memory.contracts import LookupResult

MAX_POLLS = 16
"""Largest number of requests in a step for which all rows are read again, in about 50 us each. They are the
oldest ones whose next row has arrived."""


@dataclass
class _Hinted:
    ticket: Ticket
    number: int
    """Number of the last hint."""
    answer: PartAnswer | None = None
    """The last answer to this hint."""
    is_polled: bool = False
    """True if the sidecar has answered, so that only rows that arrive can change the answer."""
    next_rows: Sequence[bytes] = ()
    """Keys of the first rows that are missing for the expected hit, one per group."""
    is_extended: bool = False
    """True if chunks were added since the last call to the sidecar, which has not ended."""


class PartSpeaker(LookupThread):
    """Makes the relayed calls, see the module. The worker's client stays open when the speaker closes."""

    is_relaying = True

    def __init__(self, client: SidecarClient, identity: PartedIdentity, names: PartNames) -> None:
        """``client``: the client of this rank's worker side."""
        super().__init__(client, identity, PrefillRate())
        self._part, self._names = identity.part, names
        self._hinted: dict[str, _Hinted] = {}  # requests of the engine until they end
        self._open: dict[str, None] = {}  # requests whose answer may change
        self._ended: dict[str, dict[int, PartAnswer]] = {}  # answers to hints of requests that ended since

    def take(self, relays: Iterable[Relay]) -> None:
        """Begin the calls of a step."""
        for relay in relays:
            hinted = self._hinted.get(relay.request_id)
            if isinstance(relay, Hint):
                self._hint(relay, hinted)
            elif hinted is not None and isinstance(relay, Lease):
                self._queue.put(partial(self._lease, hinted.ticket, relay.num_chunks))
            elif hinted is not None:
                self._end(relay.request_id)

    def close(self) -> None:
        """End all leases, because no relay will end them. Then close as ``LookupThread`` does."""
        for request_id in list(self._hinted):
            self._end(request_id)
        super().close()

    def take_answers(self) -> dict[str, dict[int, PartAnswer]]:
        """Return the answers to new hints, and those that changed: the sidecar answered, or rows arrived."""
        answers, self._ended = self._ended, {}
        arrived = self._arrived()
        for request_id in list(self._open):
            hinted = self._hinted[request_id]
            is_asking = hinted.ticket.is_asking
            if hinted.is_extended and not is_asking:
                hinted.is_extended = False
                self.ask(hinted.ticket)
                is_asking = hinted.ticket.is_asking
            is_unchanged = hinted.is_polled and request_id not in arrived
            if is_unchanged or (hinted.answer is not None and is_asking):
                continue
            hinted.is_polled = not is_asking
            answer, is_final = self._answer(hinted)
            if is_final:
                del self._open[request_id]
            if answer != hinted.answer:
                hinted.answer = answer
                answers[request_id] = {self._part: answer}
        return answers

    def _arrived(self) -> set[str]:
        """Return requests whose next row has arrived. A row of an old request may never arrive."""
        polled = ((name, self._hinted[name]) for name in self._open)
        next_rows = [(name, row) for name, hinted in polled if hinted.is_polled for row in hinted.next_rows]
        if (index := self.index) is None or not next_rows:
            return set()
        is_there = index.find_each(words_of(b"".join(row for _, row in next_rows))).is_there
        arrived = itertools.compress(next_rows, is_there.tolist())
        return {name for name, _ in itertools.islice(arrived, MAX_POLLS)}

    def _hint(self, hint: Hint, hinted: _Hinted | None) -> None:
        self.private_reason = hint.private_reason
        self._rate = PrefillRate(hint.tokens_per_second)
        if hint.chunk_keys and not hint.first_chunk:
            hinted = self._hinted[hint.request_id] = _Hinted(self._ticket(hint), hint.number)
        elif hinted is None:  # an earlier step failed
            return
        elif hint.chunk_keys:
            self._extend(hinted.ticket, hint)
        hinted.number, hinted.answer, hinted.is_polled = hint.number, None, False
        self._open[hint.request_id] = None
        if not hinted.ticket.is_asking:
            self.ask(hinted.ticket)
        elif hint.chunk_keys:
            hinted.is_extended = True

    def _ticket(self, hint: Hint) -> Ticket:
        ticket = Ticket(
            hint.request_id,
            [],
            self._names.namespace(hint.namespace),
            tenant=self._names.tenant(b"", hint.salt_hash),
            num_handed_over=hint.num_handed_over,
        )
        ticket.keys = tuple([] for _ in self._groups)
        self._extend(ticket, hint)
        return ticket

    def _extend(self, ticket: Ticket, hint: Hint) -> None:
        """Add the chunks of a hint to the ticket. The lookup thread may be using the ticket."""
        row_keys_by_group = tuple(
            known + row_keys(ticket.namespace, chunk_keys)
            for known, chunk_keys in zip(ticket.keys or (), hint.chunk_keys, strict=True)
        )
        ticket.words = tuple(words_of(b"".join(part)) for part in row_keys_by_group)
        ticket.keys = row_keys_by_group

    def _answer(self, hinted: _Hinted) -> tuple[PartAnswer, bool]:
        """Return the answer, and True if it can't change. Note the next row."""
        is_asking = hinted.ticket.is_asking  # read first: the lookup thread writes its answer before
        result, index, words = hinted.ticket.answer or LookupResult(), self.index, hinted.ticket.words
        present = [
            index.find_each(part)[0] if index is not None else np.zeros(len(part), bool) for part in words
        ]
        num_resident = longest_hit(
            self._grid.stored, self._grid.chunk_tokens, [part.tobytes() for part in present], 0, len(words[0])
        )
        is_probing, num_expected = is_asking or result.is_probing, max(result.num_expected, num_resident)
        end = len(words[0]) if is_probing else num_expected
        needed = (
            slice(first_needed_chunk(group, end, self._grid.chunk_tokens), end) for group in self._grid.stored
        )
        missing = (rows[part][~flags[part]] for rows, flags, part in zip(words, present, needed, strict=True))
        hinted.next_rows = [rows[0].tobytes() for rows in missing if len(rows)]
        residency = tuple(np.packbits(part).tobytes() for part in present)
        answer = PartAnswer(hinted.number, residency, num_expected, is_probing)
        return answer, not is_probing and num_resident >= result.num_expected

    def _end(self, request_id: str) -> None:
        hinted = self._hinted.pop(request_id)
        self._open.pop(request_id, None)
        if hinted.answer is None:  # any answer shows that the part is not silent
            self._ended[request_id] = {self._part: PartAnswer(hinted.number, (), 0, is_probing=False)}
        self._queue.put(partial(self._end_lease, hinted.ticket))

    # ---- the lookup thread ----

    def _lease(self, ticket: Ticket, num_chunks: int) -> None:
        ticket.may_be_leased = True
        self._call(lambda session: self._lookup(session, ticket, num_chunks))
        self._touch(ticket, num_chunks)

    def _end_lease(self, ticket: Ticket) -> None:
        if not ticket.may_be_leased:
            self._touch(ticket, 0)
        self._release(ticket)

    def _touch(self, ticket: Ticket, num_touched: int) -> None:
        """Mark the rows of the request as used. In part 0, the report of its schedule does this."""
        hit = self.find(ticket)
        if hit is not None and hit.num_chunks > num_touched:
            self._call(lambda session: self._lookup(session, ticket, hit.num_chunks, is_hint=True))

    def _detach(self) -> None:
        """Leave the client open, because the worker side uses it."""
