"""One session of a client with the sidecar: its calls, and its view of the arena."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from lmcache_client.rpc import errors, service
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.hints import hint_fields, parse_decisions
from lmcache_client.rpc.open_copies import OpenCopies
from lmcache_client.rpc.times import RequestTimes
from lmcache_store.common.timing import TIMING
from lmcache_store.hints import HintDecision, Hints
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.contracts import LookupResult, Reservation, Reserved, Slot
from lmcache_store.tiers.memory.mapping import MappedColumn, MappedIndex

_MAX_BLOCKS = service.MAX_MESSAGE_BYTES // 8
"""Largest number of blocks in one message, of 4 bytes each."""

_MAX_RELEASES = 2048
"""Largest number of ids in one message. After a long silence of the sidecar, more releases may be pending."""

_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Status codes of calls that changed nothing. After any other code, the call may have been carried out."""


_STORE_METHODS = (service.RESERVE, service.COMMIT, service.ABORT)


class StoreCopier(NamedTuple):
    """The side that copies stores, and the reason."""

    is_sidecar: bool
    """True: the sidecar copies; False: the engine copies."""
    reason: str

    @classmethod
    def of(cls, message: pb.StoreCopier) -> StoreCopier:
        """Parse the sidecar's message."""
        return cls(message.store_copier == pb.COPIER_SIDECAR, message.reason)


class BlockCopy(NamedTuple):
    """One slot that the sidecar shall fill from the engine's blocks."""

    group: int
    slot: Slot
    blocks: Sequence[int]
    """Numbers of all blocks that a row of the group holds, in their order."""


class SharedMarks(NamedTuple):
    """Marks of documents that the sidecar knows."""

    marks: bytes
    """Packed little-endian 64-bit numbers, the oldest first. May repeat marks that the caller has."""
    since: int
    """Number to pass to the next call of this session."""


class SidecarSession:
    """One epoch: from an Attach to the end of its stream. All calls raise only ``SidecarError``."""

    def __init__(
        self,
        channel: grpc.Channel,
        client_uuid: bytes,
        attached: pb.Attached,
        column: MappedColumn | None,
        index: MappedIndex,
        copies: OpenCopies,
        *,
        on_stale: Callable[[str], None],
        pending_releases: set[str],
    ) -> None:
        """``on_stale``: called with the reason why this epoch must end; ``pending_releases``: ids of requests
        of any epoch whose release has not reached the sidecar yet."""
        self.epoch = attached.epoch
        self.is_over = False
        self.index = index
        """Index of the rows in memory, readable without a call."""
        self.memory_only = attached.memory_only
        """True if there is no lower tier: a lookup finds no more than the index shows."""
        self.store_copier = StoreCopier(attached.store_copier == pb.COPIER_SIDECAR, attached.copier_reason)
        """The side that copies stores now. The sidecar may change this at any time."""
        self._client_uuid = client_uuid
        self._column = column
        self._copies = copies
        self._on_stale = on_stale
        self._pending_releases = pending_releases
        self._pid = os.getpid()
        self._calls = {
            method: channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.reply.FromString,
            )
            for method in service.UNARY_METHODS
        }

    @property
    def slots(self) -> npt.NDArray[np.uint8] | None:
        """This worker's column of the arena, ``[num_rows, slot_bytes]``; None for the scheduler.

        Access only rows that a reply of the sidecar names: these are filled with memory.
        """
        return self._column.slots if self._column is not None else None

    def view(self, row: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the first ``num_bytes`` of this worker's column of a row, as a flat view.

        ``num_bytes``: ``chunk_bytes`` of the row's group. Raises StaleSessionError for a row outside this
        arena, which must be from an older session, and if the arena's file has another length now.
        """
        if self._column is None:
            raise errors.SidecarUnavailableError(
                "only workers map rows: this client attached as the scheduler"
            )
        try:
            return self._column.view(row, num_bytes)
        except (IndexError, ArenaError) as error:
            raise errors.StaleSessionError(str(error)) from error

    def lookup(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        *,
        tenant: bytes = b"",
        prefill_tokens_per_second: float = 0.0,
        hint: bool = False,
        scheduled: pb.Scheduled | None = None,
        num_handed_over: int = 0,
        private_reason: str = "",
        is_relayed: bool = False,
        timeout: float | None = None,
    ) -> LookupResult:
        """Look up a request's leading chunks, and lease the rows in memory that a hit of them needs.

        Repeating the call with the same id extends the lease. Release the id in the end, also after an error:
        a call whose answer was lost may have taken the lease.

        Args:
            group_keys: (KV group, row keys of the same chunks) of every group that stores something. Only the
                first ``MAX_KEYS_PER_LOOKUP`` keys are looked up.
            tenant: the tenant whose rows these are.
            prefill_tokens_per_second: how fast the engine computes, so that the sidecar promotes only chunks
                that it loads sooner; 0.0: unknown.
            hint: take no lease. The sidecar reports what it has and starts to promote chunks.
            scheduled: how the request gets its chunks, for the sidecar's counts; pass it once per request.
                Together with ``hint``, nothing is promoted.
            num_handed_over: leading chunks that another engine has computed a moment ago. The sidecar asks
                lower tiers for their rows in each call, because they may be stored only now.
            private_reason: why keys became private after the attach; empty: they did not.
            is_relayed: do not count a request. A worker relays lookups of another node. The lookups of a
                scheduler are for a document within a prompt, which uses these rows if it is no ``hint``.
            timeout: deadline in seconds; None: ``TIMING.call_seconds``.
        """
        if not hint:
            self._pending_releases.discard(bounded(request_id))  # a late release would end this lease
        reply = self._call(
            service.LOOKUP,
            timeout,
            request_id=bounded(request_id),
            groups=_leading_keys(group_keys),
            tenant=tenant,
            prefill_tokens_per_second=prefill_tokens_per_second,
            hint=hint,
            scheduled=scheduled,
            num_handed_over_chunks=num_handed_over,
            private_reason=service.shortened(private_reason),
            relayed=is_relayed,
        )
        return LookupResult(reply.num_resident, reply.num_leased, reply.num_pending, reply.probing)

    def reserve(
        self,
        group: int,
        keys: bytes,
        *,
        request_id: str = "",
        first_chunk: int = 0,
        tenant: bytes = b"",
        timeout: float | None = None,
    ) -> list[Reservation]:
        """Reserve slots in this client's column for row keys, in the order of the chunks; one answer per key.

        The rows of one ``request_id``, from any number of calls, are evicted from the request's end.
        """
        reservations = []
        step = service.MAX_KEYS_PER_CALL
        for first in range(0, max(1, len(keys) // ROW_KEY_BYTES), step):
            reply = self._call(
                service.RESERVE,
                timeout,
                group=group,
                keys=keys[first * ROW_KEY_BYTES : (first + step) * ROW_KEY_BYTES],
                request_id=bounded(request_id) if request_id else "",
                first_chunk=first_chunk + first,
                tenant=tenant,
            )
            slots = iter(service.unpack_slots(reply.slots))
            reservations += [
                Reservation(Reserved(result), next(slots) if result == pb.SLOT else None)
                for result in reply.results
            ]
        return reservations

    def copy_blocks(self, copies: Sequence[BlockCopy], timeout: float | None = None) -> list[bool]:
        """Let the sidecar fill reserved slots from the engine's GPU memory. Return for each if it is filled.

        The GPU must have ended the work that writes these blocks. Raises EngineCopiesError if the sidecar
        can't copy: it has filled none of these slots, and ``store_copier`` gives the reason. After any other
        error a copy may still be running: abort these slots, commit none.
        """
        copied: list[bool] = []
        longest = max((len(copy.blocks) for copy in copies), default=0)
        step = min(service.MAX_KEYS_PER_CALL, max(1, _MAX_BLOCKS // max(1, longest)))
        for first in range(0, len(copies), step):
            part = copies[first : first + step]
            groups = [
                _group_copies(group, list(members))
                for group, members in itertools.groupby(part, lambda copy: copy.group)
            ]
            reply = self._call(service.COPY_BLOCKS, timeout, groups=groups)
            copied += reply.copied
        return copied

    def commit(self, slots: Sequence[Slot], timeout: float | None = None) -> None:
        """Report that the bytes of reserved slots are complete, so that the sidecar publishes them.

        Refused if one slot is not held by this client. More than ``MAX_KEYS_PER_CALL`` slots take several
        calls; those before the refused call are committed.
        """
        self._call_sliced(service.COMMIT, slots, timeout)

    def abort(self, slots: Sequence[Slot], timeout: float | None = None) -> None:
        """Give reserved slots back. No copy into them may be running."""
        self._call_sliced(service.ABORT, slots, timeout)

    def release(
        self, request_ids: Sequence[str], timeout: float | None = None, times: Sequence[RequestTimes] = ()
    ) -> None:
        """End leases. Call it once per request: ids that could not be sent follow with the next release.

        ``times``: how long requests took, at most ``MAX_TIMES``. The caller repeats them after an error.
        """
        self._pending_releases.update(map(bounded, request_ids))
        sent = list(self._pending_releases)[:_MAX_RELEASES]
        taken = [pb.RequestTimes(**request._asdict()) for request in times]
        for request in taken:
            request.request_id = bounded(request.request_id)
        self._call(service.RELEASE, timeout, request_ids=sent, times=taken)
        self._pending_releases.difference_update(sent)

    def apply_hints(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        tenant: bytes,
        hints: Hints,
        answer_id: str = "",
        timeout: float | None = None,
    ) -> list[HintDecision]:
        """Execute the actions of a request's KV hints. Return one decision for each action, in their order.

        ``request_id``, ``group_keys``, ``tenant``: see ``lookup``. If there is an ``answer_id``, the sidecar
        keeps these decisions, together with the refusals in ``hints``, until ``AnswerReader`` reads them.
        Raises RpcRefusedError with UNIMPLEMENTED if the sidecar is older than this call.
        """
        reply = self._call(
            service.APPLY_HINTS,
            timeout,
            request_id=bounded(request_id),
            groups=_leading_keys(group_keys),
            tenant=tenant,
            answer_id=answer_id,
            **hint_fields(hints),
        )
        return parse_decisions(reply)

    def share_marks(self, marks: bytes, since: int, timeout: float | None = None) -> SharedMarks:
        """Add marks of documents to the sidecar's table. Return the marks that were added after ``since``.

        Raises RpcRefusedError with UNIMPLEMENTED if the sidecar is older than this call.

        Args:
            marks: packed little-endian 64-bit numbers; any number of them.
            since: ``SharedMarks.since`` of the last call of this session; 0: return all marks.
            timeout: deadline of each message in seconds; None: ``TIMING.call_seconds``. A message contains at
                most ``MAX_MARKS_PER_CALL`` marks.
        """
        page_bytes = service.MAX_MARKS_PER_CALL * service.MARK_BYTES
        most_bytes = service.MAX_MARKS * service.MARK_BYTES
        rest, received = marks, bytearray()
        while True:
            reply = self._call(service.SHARE_MARKS, timeout, marks=rest[:page_bytes], since=since)
            rest, since = rest[page_bytes:], reply.since
            received += reply.marks
            has_more = len(reply.marks) == page_bytes and len(received) < most_bytes
            if not rest and not has_more:
                return SharedMarks(bytes(received), since)

    def holds(self, slot: Slot) -> bool:
        """Return True if the slot was not reused; check this after a load's copy. Only reads memory.

        Accepts slots of other sessions, whose arena may be larger.
        """
        return self._column is not None and slot.row < len(self._column.slots) and self._column.holds(slot)

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager to hold around every copy from or to the arena, and its commit or abort.

        Raises StaleSessionError if the session is over. The sidecar keeps the slots of older sessions in
        quarantine until all their blocks are closed.
        """
        return self._copies.block(self)

    def check_present(self) -> None:
        """Raise StaleSessionError if the session is over, SidecarUnavailableError in a forked child."""
        if os.getpid() != self._pid:
            raise errors.SidecarUnavailableError(
                "this process was forked from the attached one: create a new SidecarClient in it"
            )
        if self.is_over:
            raise errors.StaleSessionError(f"epoch {self.epoch} is over: use the client's present session")

    def _call_sliced(self, method: service.Method, slots: Sequence[Slot], timeout: float | None) -> None:
        step = service.MAX_KEYS_PER_CALL
        for first in range(0, max(1, len(slots)), step):
            self._call(method, timeout, slots=service.pack_slots(slots[first : first + step]))

    def _call(self, method: service.Method, timeout: float | None, **fields: Any) -> Any:
        timeout = TIMING.call_seconds if timeout is None else timeout
        self.check_present()
        try:
            request: Message = method.request(epoch=self.epoch, client_uuid=self._client_uuid, **fields)
            return self._calls[method](request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate(method, timeout, error) from error
        except ValueError as error:  # the channel was closed meanwhile, or a value does not fit its field
            self.check_present()
            raise errors.RpcRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _translate(self, method: service.Method, timeout: float, error: grpc.RpcError) -> errors.SidecarError:
        code, details = error.code(), error.details() or ""
        if code not in _REFUSALS:
            silence = f"{method.name} was not answered"
            if method in _STORE_METHODS:
                self._on_stale(f"{silence}: the client attaches again")
            limit = f" within {timeout:g} s" if code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            return errors.SidecarUnavailableError(f"{silence}{limit}: {code.name}: {details}")
        if service.reason_of(error) == service.REASON_ATTACH_AGAIN:
            self._on_stale(details)
            return errors.StaleSessionError(details)
        if service.reason_of(error) == service.REASON_ENGINE_COPIES:
            return errors.EngineCopiesError(code, details)
        return errors.RpcRefusedError(code, details)


def _leading_keys(group_keys: Sequence[tuple[int, bytes]]) -> list[pb.GroupKeys]:
    part = slice(service.MAX_KEYS_PER_LOOKUP // max(1, len(group_keys)) * ROW_KEY_BYTES)
    return [pb.GroupKeys(group=group, keys=keys[part]) for group, keys in group_keys]


def _group_copies(group: int, copies: Sequence[BlockCopy]) -> pb.GroupCopies:
    blocks = np.array([copy.blocks for copy in copies], "<u4")
    return pb.GroupCopies(
        group=group, slots=service.pack_slots(copy.slot for copy in copies), blocks=blocks.tobytes()
    )


def bounded(request_id: str) -> str:
    """Return the id, or a hash of it if the sidecar would refuse it: users of the engine choose the ids.

    A refused id could never be released, nor the other ids of its message.
    """
    if request_id.isascii() and 0 < len(request_id) <= service.MAX_REQUEST_ID_BYTES:
        return request_id
    return hashlib.sha256(request_id.encode(errors="backslashreplace")).hexdigest()
