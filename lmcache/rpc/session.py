"""One epoch of a client: its calls, its view of the arena, and the count of copies under way."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.errors import (
    EngineCopiesError,
    RpcRefusedError,
    SidecarError,
    SidecarUnavailableError,
    StaleSessionError,
)
from lmcache.tiers.base import ROW_KEY_BYTES
from lmcache.tiers.memory.contracts import LookupResult, Reservation, Reserved, Slot
from lmcache.tiers.memory.mapping import MappedColumn, MappedIndex

DEFAULT_TIMEOUT_SECONDS = 2.0

_MAX_RELEASES = 4096
"""Ids in one message, which is bounded itself; after a long silence of the sidecar more may be pending."""

_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Codes that promise that nothing was done; with any other the call may have been done."""


_STORE_METHODS = (service.RESERVE, service.COMMIT, service.ABORT)


class StoreCopier(NamedTuple):
    """Who copies stores, and why."""

    is_sidecar: bool
    reason: str

    @classmethod
    def of(cls, message: pb.StoreCopier) -> StoreCopier:
        """As the sidecar says it."""
        return cls(message.store_copier == pb.COPIER_SIDECAR, message.reason)


class BlockCopy(NamedTuple):
    """One slot for the sidecar to fill from the engine's blocks."""

    group: int
    slot: Slot
    blocks: Sequence[int]
    """All that a row of the group holds, in their order."""


class Scheduled(NamedTuple):
    """What becomes of a request's chunks: the fields are those of ``kvcache.proto``."""

    num_engine_chunks: int = 0
    num_hit_chunks: int = 0
    num_loaded_tokens: int = 0


class Copies:
    """The open ``copying`` blocks of one client, which must know when those that were open once are left."""

    def __init__(self, on_left: Callable[[], None]) -> None:
        """``on_left``: called when those that somebody may wait for are left."""
        self._lock = threading.Lock()  # protects what follows, and a session's end against a block's begin
        self._open: dict[object, Session] = {}
        self._marked: set[object] = set()
        self._on_left = on_left

    @property
    def drained(self) -> bool:
        """True when no block of a session that is over is open."""
        return not any(session.is_over for session in list(self._open.values()))

    @property
    def idle(self) -> bool:
        """True when no block is open at all."""
        return not self._open

    def mark(self) -> None:
        """Remember which are open now."""
        with self._lock:
            self._marked = set(self._open)

    @property
    def marked_left(self) -> bool:
        """Are those that were open at the last ``mark`` left?"""
        return not self._marked

    @contextlib.contextmanager
    def block(self, session: Session) -> Iterator[None]:
        """Hold a block open. Raises StaleSessionError."""
        block = object()
        with self._lock:
            session.check_present()
            self._open[block] = session
        try:
            yield
        finally:
            with self._lock:
                del self._open[block]
                is_news = (session.is_over and self.drained) or self._marked == {block}
                self._marked.discard(block)
            if is_news:
                self._on_left()

    def finish(self, session: Session) -> None:
        """End the session: its open blocks count as older from now on."""
        with self._lock:
            session.is_over = True


class Session:
    """One epoch: from one Attach to the end of its stream. All calls raise ``SidecarError``, nothing else."""

    def __init__(
        self,
        channel: grpc.Channel,
        client_uuid: bytes,
        attached: pb.Attached,
        column: MappedColumn | None,
        index: MappedIndex,
        copies: Copies,
        *,
        on_stale: Callable[[str], None],
        pending_releases: set[str],
    ) -> None:
        """``on_stale``: called with the reason why this epoch must end; ``pending_releases``: ids of requests
        whose release did not reach the sidecar yet, in whatever epoch."""
        self.epoch = attached.epoch
        self.is_over = False
        self.index = index
        """What is in memory, to be read without a call."""
        self.memory_only = attached.memory_only
        """True when the index shows all there is: no call would find more."""
        self.store_copier = StoreCopier(attached.store_copier == pb.COPIER_SIDECAR, attached.copier_reason)
        """As it is now: the sidecar may begin or end to copy stores at any time."""
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
        """``[num_rows, slot_bytes]``, this worker's column of the arena; None for the scheduler.

        Rows that the sidecar names in replies are ready; others must not be touched.
        """
        return self._column.slots if self._column is not None else None

    def view(self, row: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The first ``num_bytes`` of this worker's column of a row, flat; ``chunk_bytes`` of its group.

        Raises StaleSessionError for a row that this arena can't have: it is from an older session.
        """
        if self._column is None:
            raise SidecarUnavailableError("only a worker maps rows: this client attached as the scheduler")
        try:
            return self._column.view(row, num_bytes)
        except IndexError as error:
            raise StaleSessionError(str(error)) from error

    def lookup(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        *,
        tenant: bytes = b"",
        prefill_tokens_per_second: float = 0.0,
        hint: bool = False,
        scheduled: Scheduled | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> LookupResult:
        """Lease the rows in memory that a hit of all these chunks needs: row keys of the same chunks in every
        group (those that store something). A ``hint`` leases nothing: it only says what is there, and has
        lower tiers bring theirs. With ``scheduled`` it is counted where the chunks were found: say it once
        per request; a hint has nothing brought then. Of very many keys only the first ``MAX_KEYS_PER_LOOKUP``
        are looked up.

        Repeating it with the same id extends the lease. Release the id in the end, also after an error: a
        call whose answer was lost may have leased.
        """
        if not hint:
            self._pending_releases.discard(bounded(request_id))  # or a late release would end this lease
        part = slice(service.MAX_KEYS_PER_LOOKUP // max(1, len(group_keys)) * ROW_KEY_BYTES)
        reply = self._call(
            service.LOOKUP,
            timeout,
            request_id=bounded(request_id),
            groups=[pb.GroupKeys(group=group, keys=keys[part]) for group, keys in group_keys],
            tenant=tenant,
            prefill_tokens_per_second=prefill_tokens_per_second,
            hint=hint,
            scheduled=pb.Scheduled(**scheduled._asdict()) if scheduled is not None else None,
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
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> list[Reservation]:
        """Ask for slots of this client's column: one answer per row key, the chain's head first.

        What is stored under one ``request_id``, in however many calls, is evicted from its tail.
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

    def copy_blocks(
        self, copies: Sequence[BlockCopy], timeout: float = DEFAULT_TIMEOUT_SECONDS
    ) -> list[bool]:
        """Have the sidecar fill reserved slots from the engine's GPU memory: is each filled?

        The work that writes these blocks must be done, on the GPU. Raises EngineCopiesError when the sidecar
        can't do it (any more): none is filled then by it, and ``store_copier`` says why. After any other
        error a copy may be under way still; commit none of these slots, abort them.
        """
        copied: list[bool] = []
        for first in range(0, len(copies), service.MAX_KEYS_PER_CALL):
            part = copies[first : first + service.MAX_KEYS_PER_CALL]
            groups = [
                _group_copies(group, list(members))
                for group, members in itertools.groupby(part, lambda copy: copy.group)
            ]
            reply = self._call(service.COPY_BLOCKS, timeout, groups=groups)
            copied += reply.copied
        return copied

    def commit(self, slots: Sequence[Slot], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Say that the bytes of reserved slots are complete. Refused if one is not held; none, or (of very
        many) only the first ones are committed then."""
        self._call_sliced(service.COMMIT, slots, timeout)

    def abort(self, slots: Sequence[Slot], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Give reserved slots back. No copy into them may be under way."""
        self._call_sliced(service.ABORT, slots, timeout)

    def release(self, request_ids: Sequence[str], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """End leases. Call it once per request: ids that were not sent go with the next release or attach."""
        self._pending_releases.update(map(bounded, request_ids))
        sent = list(self._pending_releases)[:_MAX_RELEASES]
        self._call(service.RELEASE, timeout, request_ids=sent)
        self._pending_releases.difference_update(sent)

    def holds(self, slot: Slot) -> bool:
        """True if the slot is still what it was given as; ask after a load's copy. Only reads memory.

        Any slot can be asked for: it may be from another session, and the arena larger then.
        """
        return self._column is not None and slot.row < len(self._column.slots) and self._column.holds(slot)

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Hold this around every copy from or to the arena, including its commit or abort.

        Raises StaleSessionError when the session is over. Until all such blocks of older sessions are left,
        the sidecar keeps their slots in quarantine.
        """
        return self._copies.block(self)

    def check_present(self) -> None:
        """Raise StaleSessionError when the session is over, SidecarUnavailableError in a forked child."""
        if os.getpid() != self._pid:
            raise SidecarUnavailableError(
                "this process was forked from the attached one: make a client of its own"
            )
        if self.is_over:
            raise StaleSessionError(f"epoch {self.epoch} is over: take the client's present session")

    def _call_sliced(self, method: service.Method, slots: Sequence[Slot], timeout: float) -> None:
        step = service.MAX_KEYS_PER_CALL
        for first in range(0, max(1, len(slots)), step):
            self._call(method, timeout, slots=service.pack_slots(slots[first : first + step]))

    def _call(self, method: service.Method, timeout: float, **fields: Any) -> Any:
        self.check_present()
        try:
            request: Message = method.request(epoch=self.epoch, client_uuid=self._client_uuid, **fields)
            return self._calls[method](request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate(method, timeout, error) from error
        except ValueError as error:  # the channel was closed under us, or a value does not fit its field
            self.check_present()
            raise RpcRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _translate(self, method: service.Method, timeout: float, error: grpc.RpcError) -> SidecarError:
        code, details = error.code(), error.details() or ""
        if code not in _REFUSALS:
            if method in _STORE_METHODS:
                self._on_stale(f"{method.name} was not answered, a new epoch says what became of its slots")
            limit = f" within {timeout:g} s" if code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            return SidecarUnavailableError(f"{method.name} was not answered{limit}: {code.name}: {details}")
        if service.reason_of(error) == service.REASON_ATTACH_AGAIN:
            self._on_stale(details)
            return StaleSessionError(details)
        if service.reason_of(error) == service.REASON_ENGINE_COPIES:
            return EngineCopiesError(code, details)
        return RpcRefusedError(code, details)


def _group_copies(group: int, copies: Sequence[BlockCopy]) -> pb.GroupCopies:
    blocks = np.array([copy.blocks for copy in copies], "<u4")
    return pb.GroupCopies(
        group=group, slots=service.pack_slots(copy.slot for copy in copies), blocks=blocks.tobytes()
    )


def bounded(request_id: str) -> str:
    """An id that the sidecar takes, whatever the engine's users chose: a refused one could never be released,
    nor anything that is sent with it."""
    if request_id.isascii() and 0 < len(request_id) <= service.MAX_REQUEST_ID_BYTES:
        return request_id
    return hashlib.sha256(request_id.encode(errors="backslashreplace")).hexdigest()
