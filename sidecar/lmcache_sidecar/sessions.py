"""Carries out the calls of clients, on the store that all clients share.

One event loop owns the store, so no call may block.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc

import lmcache_store
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.hints import decision_message
from lmcache_sidecar.clients import offers, validation
from lmcache_sidecar.clients.registry import Client, Clients
from lmcache_sidecar.clients.validation import CallRefusedError, precondition
from lmcache_sidecar.copiers.copier import SidecarCopier
from lmcache_sidecar.explain.causes import Causes, UncountedRequest, find_blocking
from lmcache_sidecar.explain.requests import RequestEngine
from lmcache_sidecar.explain.sources import find_sources
from lmcache_sidecar.hints import HintBoard, HintedPrompt
from lmcache_sidecar.marks import MarkScope, MarkTables
from lmcache_sidecar.samples import LookupSampler
from lmcache_store.tiers.errors import ArenaError, StaleSlotError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry, Slot
from lmcache_store.tiers.memory.kernel_pages import reason_not_pinnable
from lmcache_store.tiers.tiered.store import TieredStore

logger = logging.getLogger(__name__)

_FINAL_DRAIN_SECONDS = 2.0
"""Time to write through the rows of engines that left, before the arena gets another format."""

_REFUSAL_SECONDS = 10.0
"""Time for which a refusal is reported. A refused client tries again after 3 s at most."""


class Sessions:
    """All clients of one sidecar and their store.

    The first Hello determines the format of ``arena``, unless an earlier sidecar's rows are adopted.
    ``make_store`` makes a TieredStore on the arena.
    """

    def __init__(
        self,
        arena: ArenaFile,
        arena_path: str,
        clients: Clients,
        copier: SidecarCopier,
        make_store: Callable[[], TieredStore],
        max_hint_seconds: float = 3600.0,
    ) -> None:
        self.arena = arena
        self.clients = clients
        self.copier = copier
        clients.on_detached = copier.detach
        self.store: TieredStore | None = None
        self._arena_path = arena_path
        self._make_store = make_store
        self.samples = LookupSampler(clients)
        self.causes = Causes()
        self.marks = MarkTables()
        self.hints = HintBoard(max_hint_seconds)
        self.on_namespace: Callable[[bytes], None] = lambda namespace: None
        """Called with the namespace of each client that attaches, before its first call."""
        clients.on_engine_dead = lambda engine: self.causes.end_engine(engine)
        self.forming = asyncio.Lock()
        """Lock for changes of the arena's format, which contain awaits."""
        self._refusal = "", -math.inf  # the last one, and its time
        self.release_round = 0
        """Present round in which workers are asked to release rows that are not ready any more; 0: none."""

    @property
    def attach_refusal(self) -> str:
        """Why a client was refused in the last seconds: others hold the arena's format; empty if none was."""
        reason, refused_at = self._refusal
        return reason if time.monotonic() - refused_at < _REFUSAL_SECONDS else ""

    @property
    def pending_work(self) -> dict[str, int]:
        """Number of rows or requests with work left in the background, by kind of work."""
        return {
            "copy": self.copier.num_slots_under_way,
            "populate": self.arena.num_pending_rows,
            "report": len(self.causes.open_requests),
            **(self.store.pending_work if self.store else {}),
        }

    def check_arena(self) -> None:
        """Raise CallRefusedError if another process changed the arena's length: its replacement is due."""
        if self.arena.is_lost:
            raise precondition(self.arena.problem, service.REASON_ATTACH_AGAIN)

    async def start(self) -> None:
        """Adopt the rows that an earlier sidecar left in the arena."""
        self.clients.find_previous()
        async with self.forming:
            if self.arena.geometry is not None:
                await self._open_store()

    # ---- the stream ----

    async def attach(self, hello: pb.Hello) -> Client:
        """Admit a client under a new epoch. Raises CallRefusedError."""
        peer = validation.parse_hello(hello)
        offers.check_offer(peer)
        self.check_arena()
        if hello.transfer.gpu_uuid and (reason := reason_not_pinnable(self.arena.path)):
            raise precondition(reason)
        probe = self.clients.probe(peer)
        try:
            async with self.forming:
                self.clients.check_admissible(peer)
                store = await self._agree_on_format(peer.geometry, tuple(hello.numa_nodes))
        except BaseException:
            probe.close()
            raise
        if not hello.private_reason:
            lengths = [group.chunk_bytes for group in peer.groups.values()]
            store.register(hello.namespace, label=hello.model.encode(), chunk_bytes=lengths)
        self.on_namespace(hello.namespace)
        client = self.clients.admit(peer, probe)
        self.copier.attach(client)
        return client

    def detach(self, client: Client) -> None:
        """Move a client whose stream ended to quarantine. A lost arena may be the reason for its end."""
        if self.arena.is_lost:
            self.clients.memory = None
        self.clients.detach(client)

    def attached_message(self, client: Client) -> pb.Attached:
        """Return the answer to Hello."""
        arena, column = self.arena, client.peer.hello.column
        index_offset, index_buckets = arena.index_place
        copier = store_copier(client)
        return pb.Attached(
            protocol_version=service.PROTOCOL_VERSION,
            server_version=lmcache_store.__version__,
            epoch=client.epoch,
            store_copier=copier.store_copier,
            copier_reason=copier.reason,
            arena_path=self._arena_path,
            table_offset=arena.table_offset(column),
            column_offset=arena.column_offset(column),
            slot_bytes=client.peer.geometry.slot_bytes,
            slots_per_frame=client.peer.geometry.slots_per_frame,
            num_rows=arena.num_rows,
            ready_rows=arena.ready_rows,
            index_offset=index_offset,
            index_buckets=index_buckets,
            memory_only=self._required_store.is_memory_only(client.peer.hello.namespace),
        )

    def extents(self, client: Client) -> tuple[int, int]:
        """Return the number of ready rows, and the release round that the client must answer; 0: none."""
        return self.arena.ready_rows, self.release_round if client.peer.is_worker else 0

    # ---- calls ----

    def lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        """Lease rows that are in memory, unless the call is a hint."""
        client = self.clients.caller(request)
        chains = validation.parse_lookup(request, client.peer)
        client.prefill_tokens_per_second = request.prefill_tokens_per_second
        client.later_private_reason = request.private_reason
        store = self._required_store
        if request.relayed:  # no request of this sidecar
            self.samples.follow(client.peer)
            if not (request.hint or client.peer.is_worker):
                sources = find_sources(chains, pb.Scheduled(num_hit_chunks=chains.num_chunks), store.origins)
                self.samples.note_document(client.peer, chains, sources, store.memory.usable_slots)
        scheduled = request.scheduled if request.HasField("scheduled") else None
        if scheduled is not None:
            sources = find_sources(chains, scheduled, store.origins)
            history, usable_slots = store.history, store.memory.usable_slots
            tokens = scheduled.num_loaded_tokens, scheduled.num_blended_tokens
            self.samples.note(client.peer, chains, sources, *tokens, usable_slots)
            num_hit, request_id = len(sources), request.request_id
            find = partial(find_blocking, chains, num_hit, request_id, store.absence, history.is_stored)
            self.causes.note(
                UncountedRequest(
                    time.time(),
                    request_id,
                    chains,
                    scheduled,
                    sources,
                    history,
                    find(),
                    self._engine(client),
                    store.memory.stats.tenants.budgets.of(chains.tenant).name,
                    store.when_answered(chains, num_hit, find),
                )
            )
            if not chains.num_chunks:
                return pb.LookupReply()
        num_resident, num_leased, num_pending, is_probing = store.lookup(
            (client.peer.engine, request.request_id),
            chains,
            chunk_seconds=client.chunk_seconds,
            is_hint=request.hint,
            num_scheduled_hits=None if scheduled is None else scheduled.num_hit_chunks,
            is_counted=not request.relayed,
        )
        return pb.LookupReply(
            num_resident=num_resident, num_leased=num_leased, num_pending=num_pending, probing=is_probing
        )

    def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Reserve slots of the client's column."""
        peer = self.clients.calling_worker(request)
        reserved = self._required_store.reserve(
            validation.parse_reserve(request, peer),
            peer.hello.column,
            peer.uuid,
            length=peer.groups[request.group].chunk_bytes,
            first_chunk=request.first_chunk,
            request=request.request_id,
            tenant=validation.parse_tenant(request.tenant),
        )
        return pb.ReserveReply(
            results=[pb.Reservation.Name(reservation.result.value) for reservation in reserved],
            slots=service.pack_slots(reservation.slot for reservation in reserved if reservation.slot),
        )

    async def copy_blocks(self, request: pb.CopyBlocksRequest) -> pb.CopyBlocksReply:
        """Fill reserved slots from the client's GPU memory.

        The slots are not reused until the copies have ended, even if the call, client or reservation ends.
        """
        client = self.clients.caller(request)
        if not client.transfer.is_ipc:
            raise precondition(client.transfer.reason, service.REASON_ENGINE_COPIES)
        peer = client.peer
        copies = offers.parse_copies(request, peer, self.arena.num_rows)
        memory, held = self._required_store.memory, [copy.slot for copy in copies]
        lengths = [peer.chunk_bytes[copy.group] for copy in copies]
        try:
            memory.hold(held, peer.hello.column, peer.uuid, lengths)
        except StaleSlotError as error:
            raise precondition(f"nothing was copied: {error}") from error
        copying = self.copier.begin(client, copies, memory.tenant)
        copying.job.ended.add_done_callback(lambda _: memory.end_hold(held, peer.hello.column))
        return pb.CopyBlocksReply(copied=await copying.wait())

    def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Commit reserved slots whose bytes are complete."""
        self._end_reservations(request, "committed", lambda store: store.commit)
        return pb.CommitReply()

    def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Free reserved slots."""
        self._end_reservations(request, "aborted", lambda store: store.memory.abort)
        return pb.AbortReply()

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        """End the leases of requests, and take the times of requests that have ended."""
        client = self.clients.caller(request)
        ended = validation.parse_times(request, client.peer.engine)
        request_ids = [validation.parse_request_id(request_id) for request_id in request.request_ids]
        for request_id in request_ids:
            self._required_store.memory.release((client.peer.engine, request_id))
        for times in ended:
            self.causes.note(times)
        return pb.ReleaseReply()

    def share_marks(self, request: pb.ShareMarksRequest) -> pb.ShareMarksReply:
        """Add marks of documents, and return those that the client does not have."""
        client = self.clients.caller(request)
        marks = validation.parse_marks(request.marks)
        table = self.marks.table(MarkScope(client.peer.hello.namespace, bool(client.private_reason)))
        table.add_of_engine(marks)
        page, since = table.since(request.since)
        return pb.ShareMarksReply(marks=page.tobytes(), since=since)

    async def apply_hints(self, request: pb.ApplyHintsRequest) -> pb.ApplyHintsReply:
        """Execute the hints of a request."""
        client = self.clients.caller(request)
        chains = validation.parse_chains(request, client.peer)
        actions = validation.parse_actions(request)
        ids = request.request_id, request.message_id, client.peer.engine
        prompt = HintedPrompt(*ids, chains, client.peer.hello.namespace)
        decided = await self.hints.apply(actions, prompt, self._required_store)
        decisions = list(map(decision_message, decided))
        if request.answer_id:
            self.hints.answers[request.answer_id] = [*decisions, *request.refusals]
        return pb.ApplyHintsReply(decisions=decisions)

    def read_hints(self, request: pb.ReadHintsRequest) -> pb.ApplyHintsReply:
        """Return a reply of ``apply_hints`` that was not read yet."""
        decisions = self.hints.answers.pop(request.answer_id, None)
        if decisions is None:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, "there is no answer of this id (yet)")
        return pb.ApplyHintsReply(decisions=decisions)

    def _engine(self, client: Client) -> RequestEngine:
        engine = client.peer.engine
        return RequestEngine(engine, self.clients.num_gpus(engine), client.prefill_tokens_per_second)

    def _end_reservations(
        self,
        request: pb.CommitRequest | pb.AbortRequest,
        done: str,
        action: Callable[[TieredStore], Callable[[Sequence[Slot], int, bytes], None]],
    ) -> None:
        peer = self.clients.calling_worker(request)
        slots = validation.parse_slots(request.slots, self.arena.num_rows)
        try:
            action(self._required_store)(slots, peer.hello.column, peer.uuid)
        except StaleSlotError as error:
            raise precondition(f"nothing was {done}: {error}") from error

    # ---- the arena's format ----

    async def _agree_on_format(self, geometry: Geometry, column_nodes: tuple[int, ...]) -> TieredStore:
        """Return the store for this geometry. Formats the arena if it has another one and no live clients."""
        present = self.arena.geometry
        if present != geometry:
            holders = self.clients.holders
            num_clients = len(holders) or len(self.clients.previous)
            if present is not None and num_clients:
                first = f", such as the {holders[0].peer}" if holders else ""
                refusal = (
                    f"the arena has the format {present} for {num_clients} live clients{first}, this client"
                    f" needs {geometry}: stop those engines, or give this engine a separate sidecar"
                )
                self._refusal = refusal, time.monotonic()
                raise precondition(refusal)
            for client in self.clients.by_uuid.values():  # without slots, so that none of them writes
                self.detach(client)
            if self.copier.has_readers:
                raise precondition("the reader of a GPU may still write to the arena: attach again")
            try:
                self.arena.check(geometry)
                await self._close_store()
                self.arena.format(geometry, column_nodes)
            except ArenaError as error:
                raise precondition(f"the arena can't be formatted: {error}") from error
            logger.info("Arena formatted: %d rows, %s", self.arena.num_rows, geometry)
        elif column_nodes:
            attached = (client.peer for client in self.clients.by_uuid.values() if client.is_attached)
            named = {tuple(peer.hello.numa_nodes) for peer in attached}
            # Data-parallel ranks share the columns. If their GPUs are on different nodes, no node is better.
            self.arena.column_nodes = column_nodes if named <= {(), column_nodes} else ()
        if self.store is not None and self.store.is_closed:
            await self._close_store()
        return self.store or await self._open_store()

    async def _close_store(self) -> None:
        """Write through the rows of engines that left, as far as time allows, and close the store."""
        if self.store is None:
            return
        await self.store.drain(_FINAL_DRAIN_SECONDS)
        if not await self.store.close(_FINAL_DRAIN_SECONDS):
            raise precondition("a lower tier has not released rows of the old format: attach again")
        self.store = self.clients.memory = None

    async def _open_store(self) -> TieredStore:
        store = self._make_store()
        await store.adopt()
        self.store, self.clients.memory = store, store.memory
        self.clients.free_unknown()
        return store

    @property
    def _required_store(self) -> TieredStore:
        assert self.store is not None, "a client is attached, so the arena is formatted"
        return self.store


def store_copier(client: Client) -> pb.StoreCopier:
    """Return the present copier of the client's stores."""
    copier = pb.COPIER_SIDECAR if client.transfer.is_ipc else pb.COPIER_ENGINE
    return pb.StoreCopier(store_copier=copier, reason=client.transfer.reason)
