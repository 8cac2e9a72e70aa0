"""Who is attached, under which epoch, and whose slots wait for a proof. One event loop owns it.

A client is **attached** from its Hello to the end of its stream, then in **quarantine** until it attaches
again and sends Drained, or is proven dead. Slots belong to the client, leases to its engine. Whoever attaches
gets a new epoch, and every call must carry the present one: what a client did in an older epoch can't be
mistaken for the new one's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lmcache.cuda.pin_status import PinStatus
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.tiers.memory.tier import MemoryTier
from lmcache_sidecar.clients.liveness import LivenessMonitor, LockProbe, probes_in
from lmcache_sidecar.clients.validation import Peer, precondition

logger = logging.getLogger(__name__)

Request = (
    pb.LookupRequest
    | pb.ReserveRequest
    | pb.CopyBlocksRequest
    | pb.CommitRequest
    | pb.AbortRequest
    | pb.ReleaseRequest
)


class Transfer(NamedTuple):
    """Who copies a client's stores, and why."""

    is_ipc: bool
    """The sidecar does, by CUDA IPC; else the engine, through shared memory."""
    reason: str


_NOTHING_TO_COPY = Transfer(False, "a scheduler copies nothing")


@dataclass(eq=False)
class Client:
    """One client, attached or in quarantine."""

    peer: Peer
    probe: LockProbe
    """Given to the liveness monitor when the stream ends."""
    epoch: int
    is_attached: bool = True
    prefill_tokens_per_second: float = 0.0
    """As it said last; 0: not known yet."""
    transfer: Transfer = _NOTHING_TO_COPY
    """As it is now."""
    pins: PinStatus | None = None
    """How much of its column its CUDA driver has pinned; None: it never said."""
    let_go: int = 0
    """The last round of Extents that it answered."""

    @property
    def chunk_seconds(self) -> float:
        """What computing one chunk takes its engine; 0.0: not known yet."""
        rate = self.prefill_tokens_per_second
        return self.peer.hello.geometry.chunk_tokens / rate if rate else 0.0

    @property
    def name(self) -> str:
        """For people."""
        hello = self.peer.hello
        return f"the worker of column {hello.column}, pid {hello.pid}"

    @property
    def state(self) -> str:
        """For people."""
        return "attached" if self.is_attached else "lost, and not proven dead"

    def check_epoch(self, epoch: int) -> None:
        """Raise RefusedError unless the stream is open and ``epoch`` its own."""
        if not self.is_attached or epoch != self.epoch:
            present = f"the present one is {self.epoch}" if self.is_attached else "its stream has ended"
            raise precondition(f"epoch {epoch} is over, {present}: attach again", service.REASON_ATTACH_AGAIN)


class Clients:
    """All clients of one sidecar."""

    def __init__(
        self,
        locks_directory: Path,
        make_probe: Callable[[Path], LockProbe] = LockProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory: MemoryTier | None = None
        """Where their slots are; None while the arena has no format."""
        self.by_uuid: dict[bytes, Client] = {}
        self.previous: set[bytes] = set()
        """Clients of an earlier sidecar that may still use adopted rows."""
        self.on_detached: Callable[[Client], None] = lambda _: None
        """Called when a client's stream ended."""
        self.monitor = LivenessMonitor(self._on_dead, clock)
        self._locks_directory = locks_directory
        self._make_probe = make_probe
        self._last_epoch = 0

    def find_previous(self) -> None:
        """Watch the clients of an earlier sidecar by the lock files that they left."""
        for uuid, probe in probes_in(self._locks_directory).items():
            self.previous.add(uuid)
            self.monitor.watch(uuid, probe)

    def probe(self, peer: Peer) -> LockProbe:
        """Open the client's lock file. Raises RefusedError unless the client holds its lock."""
        path = self._locks_directory / f"{peer.uuid.hex()}.lock"
        try:
            probe = self._make_probe(path)
        except OSError as error:
            raise precondition(
                f"the client's lock file can't be opened, {error}: make it, then attach"
            ) from error
        if not probe.is_held():
            probe.close()
            raise precondition(f"no other process holds the record lock on {path}: take it, then attach")
        return probe

    def check_engine(self, peer: Peer) -> None:
        """Raise RefusedError if another client of its engine says something else of it."""
        if any(other.layout != peer.layout for other in self._peers(peer.engine)):
            raise precondition(
                "another client of this engine_uuid has another namespace or geometry:"
                " all ranks of an engine must agree"
            )

    def admit(self, peer: Peer, probe: LockProbe) -> Client:
        """Attach it under a new epoch; takes over the probe."""
        if (older := self.by_uuid.get(peer.uuid)) is not None:
            self.detach(older)
        self.monitor.forget(peer.uuid)
        self._last_epoch = max(self._last_epoch + 1, time.time_ns())  # differs from all earlier sidecars'
        client = self.by_uuid[peer.uuid] = Client(peer, probe, self._last_epoch)
        logger.info("Client %s attached, epoch %d: %s", peer.uuid.hex(), client.epoch, peer)
        return client

    def detach(self, client: Client) -> None:
        """The client's stream ended: what it holds goes to quarantine."""
        if not client.is_attached:
            return
        client.is_attached = False
        if self.memory is not None:
            self.memory.quarantine(client.peer.uuid)
        self.on_detached(client)
        self.monitor.watch(client.peer.uuid, client.probe)
        logger.info("Client %s lost, epoch %d: in quarantine", client.peer.uuid.hex(), client.epoch)

    def drained(self, client: Client, message: pb.Drained) -> None:
        """No copy of an older epoch is under way in the client."""
        client.check_epoch(message.epoch)
        self._free(client.peer.uuid)

    def caller(self, request: Request) -> Client:
        """Who calls. Raises RefusedError unless it is attached, under the epoch of the request."""
        client = self.by_uuid.get(request.client_uuid)
        if client is None or not client.is_attached:
            raise precondition("this client is not attached: attach again", service.REASON_ATTACH_AGAIN)
        client.check_epoch(request.epoch)
        return client

    def calling_worker(self, request: Request) -> Peer:
        """The rank that calls. Raises RefusedError for a scheduler, too."""
        peer = self.caller(request).peer
        if not peer.is_worker:
            raise precondition("only a worker stores: this client attached as the scheduler")
        return peer

    def that_can_not_let_go(self) -> str:
        """Name a worker that will never answer a round of Extents; empty: there is none."""
        too_old = [one for one in self._workers if not one.peer.hello.can_let_go]
        return "".join(f"{one.name}, version {one.peer.hello.client_version}" for one in too_old[:1])

    def holding(self, round_: int) -> str:
        """Name who may still use memory that is not ready any more, or have it pinned; empty: nobody."""
        if self.previous:
            return f"{len(self.previous)} clients of before the sidecar's restart, which may still run"
        late = [one for one in self._workers if not one.is_attached or one.let_go != round_]
        return "".join(f"{one.name}, {one.state}, to let go of it" for one in late[:1])

    @property
    def _workers(self) -> list[Client]:
        return [client for client in self.by_uuid.values() if client.peer.is_worker]

    def _peers(self, engine: bytes) -> list[Peer]:
        return [client.peer for client in self.by_uuid.values() if client.peer.engine == engine]

    def free_unknown(self) -> None:
        """Free the slots of owners that left no lock file: they detached, or their pod is another one by
        now."""
        assert self.memory is not None
        for uuid in self.memory.quarantined_owners - self.previous:
            self.memory.end_quarantine(uuid)
        if not self.previous:
            self.memory.release_adopted()

    def _free(self, uuid: bytes) -> None:
        """Nothing of the client's older epochs is in use any more."""
        self.previous.discard(uuid)
        if self.memory is not None:
            self.memory.end_quarantine(uuid)
            if not self.previous:
                self.memory.release_adopted()

    def _on_dead(self, uuid: bytes) -> None:
        logger.info("Client %s is dead: its slots may be reused", uuid.hex())
        self._free(uuid)
        client = self.by_uuid.pop(uuid, None)
        if client is not None and self.memory is not None and not self._peers(client.peer.engine):
            self.memory.quarantine_leases(client.peer.engine)
            self.memory.end_lease_quarantine(client.peer.engine)
