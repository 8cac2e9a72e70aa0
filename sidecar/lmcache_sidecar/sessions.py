"""Who is attached, under which epoch, and what they may touch. One event loop owns it; nothing here blocks.

A client is **attached** from its Hello to the end of its stream, then in **quarantine** until it attaches
again and sends Drained, or is proven dead. Slots belong to the client, leases to its engine. Whoever attaches
gets a new epoch, and every call must carry the present one: what a client did in an older epoch can't be
mistaken for the new one's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmcache
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.tiers.errors import ArenaError, StaleSlotError
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.contracts import Geometry, Slot
from lmcache.tiers.tiered.store import TieredStore
from lmcache_sidecar import wire
from lmcache_sidecar.liveness import DeathWatch, LockProbe, probes_in
from lmcache_sidecar.wire import Peer

logger = logging.getLogger(__name__)

_Request = pb.LookupRequest | pb.ReserveRequest | pb.CommitRequest | pb.AbortRequest | pb.ReleaseRequest
_FAREWELL_SECONDS = 2.0


@dataclass
class Client:
    """One client, attached or in quarantine."""

    peer: Peer
    probe: LockProbe  # given to the death watch when the stream ends
    epoch: int
    is_attached: bool = True
    prefill_tokens_per_second: float = 0.0  # as it said last; 0: not known yet

    @property
    def chunk_seconds(self) -> float:
        """What computing one chunk takes its engine; 0.0: not known yet."""
        rate = self.prefill_tokens_per_second
        return self.peer.hello.geometry.chunk_tokens / rate if rate else 0.0

    @property
    def copier_reason(self) -> str:
        """Why the engine copies, stores included."""
        has_gpu = self.peer.hello.transfer.gpu_uuid
        kind = "in GPU memory, which this sidecar can't read" if has_gpu else "in host memory"
        return f"the engine copies: its KV is {kind}"

    def check_epoch(self, epoch: int) -> None:
        """Raise Refused unless the stream is open and ``epoch`` its own."""
        if not self.is_attached or epoch != self.epoch:
            present = f"the present one is {self.epoch}" if self.is_attached else "its stream has ended"
            raise wire.precondition(
                f"epoch {epoch} is over, {present}: attach again", service.REASON_ATTACH_AGAIN
            )


class Sessions:
    """All clients of one sidecar and the store they share.

    ``arena`` is formatted by the first Hello, or adopted; ``make_store`` makes a TieredStore over it.
    """

    def __init__(
        self,
        arena: ArenaFile,
        arena_path: str,
        locks_directory: Path,
        make_store: Callable[[], TieredStore],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.store: TieredStore | None = None
        self.clients: dict[bytes, Client] = {}
        self.deaths = DeathWatch(self._bury, clock)
        self._arena_path = arena_path
        self._locks_directory = locks_directory
        self._make_store = make_store
        self.from_before: set[bytes] = set()  # clients of an earlier sidecar that may still use adopted rows
        self._last_epoch = 0
        self._forming = asyncio.Lock()  # protects the change of the arena's format, which awaits

    async def start(self) -> None:
        """Adopt what an earlier sidecar left in the arena."""
        for uuid, probe in probes_in(self._locks_directory).items():
            self.from_before.add(uuid)
            self.deaths.watch(uuid, probe)
        async with self._forming:
            if self.arena.geometry is not None:
                await self._open_store()

    # ---- attaching ----

    async def attach(self, hello: pb.Hello) -> Client:
        """Admit a client under a new epoch. Raises Refused."""
        peer = wire.parse_hello(hello)
        probe = self._prove_life(peer)
        try:
            async with self._forming:
                self._check_engine(peer)
                store = await self._agree_on_format(peer.geometry)
        except BaseException:
            probe.close()
            raise
        if (older := self.clients.get(peer.uuid)) is not None:
            self.detach(older)
        self.deaths.forget(peer.uuid)
        self._last_epoch = max(self._last_epoch + 1, time.time_ns())  # differs from all earlier sidecars'
        client = self.clients[peer.uuid] = Client(peer, probe, self._last_epoch)
        if not hello.private_reason:
            store.register(hello.namespace, label=hello.model.encode())
        logger.info("Client %s attached, epoch %d: %s", peer.uuid.hex(), client.epoch, _describe(peer))
        return client

    def attached_message(self, client: Client) -> pb.Attached:
        """The answer to Hello."""
        arena, column = self.arena, client.peer.hello.column
        index_offset, index_buckets = arena.index_place
        return pb.Attached(
            protocol_version=service.PROTOCOL_VERSION,
            server_version=lmcache.__version__,
            epoch=client.epoch,
            store_copier=pb.COPIER_ENGINE,
            copier_reason=client.copier_reason,
            arena_path=self._arena_path,
            table_offset=arena.table_offset(column),
            column_offset=arena.column_offset(column),
            slot_bytes=client.peer.geometry.slot_bytes,
            num_rows=arena.num_rows,
            ready_rows=arena.ready_rows,
            index_offset=index_offset,
            index_buckets=index_buckets,
            memory_only=self._present_store.is_memory_only(client.peer.hello.namespace),
        )

    def drained(self, client: Client, message: pb.Drained) -> None:
        """No copy of an older epoch is under way in the client."""
        client.check_epoch(message.epoch)
        self._settle(client.peer.uuid)

    def detach(self, client: Client) -> None:
        """The client's stream ended: what it holds goes to quarantine."""
        if not client.is_attached:
            return
        client.is_attached = False
        self._present_store.memory.quarantine(client.peer.uuid)
        self.deaths.watch(client.peer.uuid, client.probe)
        logger.info("Client %s lost, epoch %d: in quarantine", client.peer.uuid.hex(), client.epoch)

    # ---- calls ----

    def lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        """Lease what is in memory, unless it is a hint."""
        client = self._caller(request)
        groups = wire.parse_lookup(request, client.peer)
        client.prefill_tokens_per_second = request.prefill_tokens_per_second
        reply = pb.LookupReply()
        for group, keys in groups:
            num_resident, num_leased, num_pending, is_probing = self._present_store.lookup(
                (client.peer.engine, request.request_id),
                keys,
                length=client.peer.chunk_bytes[group],
                row_seconds=client.chunk_seconds / len(groups),
                is_hint=request.hint,
            )
            reply.groups.add(
                num_resident=num_resident, num_leased=num_leased, num_pending=num_pending, probing=is_probing
            )
        return reply

    def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Give out slots of the client's column."""
        peer = self._worker(request).peer
        keys = wire.parse_reserve(request, peer)
        reserved = self._present_store.reserve(
            keys,
            peer.hello.column,
            peer.uuid,
            length=peer.chunk_bytes[request.group],
            first_chunk=request.first_chunk,
            request=request.request_id,
            tenant=request.tenant,
        )
        return pb.ReserveReply(
            results=[pb.Reservation.Name(reservation.result.value) for reservation in reserved],
            slots=service.pack_slots(reservation.slot for reservation in reserved if reservation.slot),
        )

    def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """The bytes of reserved slots are complete."""
        self._finish(request, "committed", lambda store: store.commit)
        return pb.CommitReply()

    def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Take reserved slots back."""
        self._finish(request, "aborted", lambda store: store.abort)
        return pb.AbortReply()

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        """End leases."""
        client = self._caller(request)
        request_ids = [wire.parse_request_id(request_id) for request_id in request.request_ids]
        for request_id in request_ids:
            self._present_store.memory.release((client.peer.engine, request_id))
        return pb.ReleaseReply()

    # ---- inside ----

    def _caller(self, request: _Request) -> Client:
        client = self.clients.get(request.client_uuid)
        if client is None or not client.is_attached:
            raise wire.precondition("this client is not attached: attach again", service.REASON_ATTACH_AGAIN)
        client.check_epoch(request.epoch)
        return client

    def _worker(self, request: _Request) -> Client:
        client = self._caller(request)
        if not client.peer.is_worker:
            raise wire.precondition("only a worker stores: this client attached as the scheduler")
        return client

    def _finish(
        self,
        request: pb.CommitRequest | pb.AbortRequest,
        done: str,
        action: Callable[[TieredStore], Callable[[Sequence[Slot], int, bytes], None]],
    ) -> None:
        peer = self._worker(request).peer
        slots = wire.parse_slots(request.slots, self.arena.num_rows)
        try:
            action(self._present_store)(slots, peer.hello.column, peer.uuid)
        except StaleSlotError as error:
            raise wire.precondition(f"nothing was {done}: {error}") from error

    def _prove_life(self, peer: Peer) -> LockProbe:
        path = self._locks_directory / f"{peer.uuid.hex()}.lock"
        try:
            probe = LockProbe(path)
        except OSError as error:
            raise wire.precondition(
                f"the client's lock file can't be opened, {error}: make it, then attach"
            ) from error
        if not probe.is_held():
            probe.close()
            raise wire.precondition(f"no other process holds the record lock on {path}: take it, then attach")
        return probe

    def _check_engine(self, peer: Peer) -> None:
        if any(other.layout != peer.layout for other in self._peers(peer.engine)):
            raise wire.precondition(
                "another client of this engine_uuid has another namespace or geometry:"
                " all ranks of an engine must agree"
            )

    async def _agree_on_format(self, geometry: Geometry) -> TieredStore:
        present = self.arena.geometry
        if present != geometry:
            if present is not None and (self.clients or self.from_before):
                raise wire.precondition(
                    f"the arena has slots of {present.slot_bytes} bytes in {present.num_columns} columns for"
                    f" {len(self.clients) or len(self.from_before)} live clients, this one needs"
                    f" {geometry.slot_bytes} in {geometry.num_columns}: stop those engines, or give this one"
                    " a sidecar of its own"
                )
            try:
                self.arena.check(geometry)
                await self._close_store()
                self.arena.format(geometry)
            except ArenaError as error:
                raise wire.precondition(f"the arena can't be formatted: {error}") from error
            logger.info("Arena formatted: %d rows, %s", self.arena.num_rows, geometry)
        if self.store is not None and self.store.is_closed:
            await self._close_store()
        return self.store or await self._open_store()

    async def _close_store(self) -> None:
        """Write through what the engines that left have stored, as far as that goes at once."""
        if self.store is None:
            return
        await self.store.drain(_FAREWELL_SECONDS)
        if not await self.store.close(_FAREWELL_SECONDS):
            raise wire.precondition(
                "a disk or remote tier still holds rows of the old format and does not answer: attach again"
            )
        self.store = None

    async def _open_store(self) -> TieredStore:
        store = self._make_store()
        await store.adopt()
        self.store = store
        # Slots of owners that left no lock file: their client said goodbye, or its pod is another one by now.
        for owner in store.memory.quarantined_owners - self.from_before:
            store.memory.end_quarantine(owner)
        if not self.from_before:
            store.memory.release_adopted()
        return store

    @property
    def _present_store(self) -> TieredStore:
        assert self.store is not None, "a client is attached, so the arena is formatted"
        return self.store

    def _peers(self, engine: bytes) -> list[Peer]:
        return [client.peer for client in self.clients.values() if client.peer.engine == engine]

    def _settle(self, uuid: bytes) -> None:
        """Nothing of the client's older epochs is in use any more."""
        self.from_before.discard(uuid)
        if self.store is not None:
            self.store.memory.end_quarantine(uuid)
            if not self.from_before:
                self.store.memory.release_adopted()

    def _bury(self, uuid: bytes) -> None:
        logger.info("Client %s is dead: its slots may be reused", uuid.hex())
        self._settle(uuid)
        client = self.clients.pop(uuid, None)
        if client is not None and not self._peers(client.peer.engine):
            memory = self._present_store.memory
            memory.quarantine_leases(client.peer.engine)
            memory.end_lease_quarantine(client.peer.engine)


def _describe(peer: Peer) -> str:
    hello = peer.hello
    role = f"worker of column {hello.column}" if peer.is_worker else "scheduler"
    private = f", private keys ({hello.private_reason})" if hello.private_reason else ""
    return f"{role}, pid {hello.pid}, model {hello.model!r}{private}"
