"""The clients of a sidecar: attached ones with their epochs, and quarantined ones. One event loop owns it.

A client is **attached** from its Hello to the end of its stream. It is then in **quarantine** until it
attaches again and sends Drained, or is proven dead. Slots belong to the client, leases to its engine.

A client gets a new epoch whenever it attaches, and every call must carry the present epoch. The sidecar can
therefore not mistake a message of an older epoch for one of the present epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_sidecar.clients.liveness import LivenessMonitor, LockProbe, probes_in
from lmcache_sidecar.clients.validation import CallRefusedError, ParsedHello, precondition
from lmcache_store.tiers.memory.tier import MemoryTier

logger = logging.getLogger(__name__)


MAX_CLIENTS = 128
"""Limit of clients that are attached or in quarantine. An engine has one per GPU, and one more.

Each takes about 30 KiB and a descriptor, and some calls take time in proportion to all of them."""


HOLD_SECONDS = 60.0
"""Time for which a client that makes no calls holds the arena's format against engines that need another."""


class ClientCall(Protocol):
    """A call of an attached client."""

    client_uuid: bytes
    epoch: int


class ChosenCopier(NamedTuple):
    """The copier of a client's stores, and the reason for the choice."""

    is_ipc: bool
    """True: the sidecar copies, by CUDA IPC. False: the engine copies, through shared memory."""
    reason: str


_NOTHING_TO_COPY = ChosenCopier(False, "a scheduler copies nothing")


@dataclass(eq=False)
class Client:
    """One client, attached or in quarantine."""

    peer: ParsedHello
    probe: LockProbe
    """Probe of the client's lock; the liveness monitor takes it over when the stream ends."""
    epoch: int
    attached_at: float = 0.0
    """Time at which the client first attached."""
    has_called: bool = False
    """Has the client made a call, in any epoch? Until then it holds no slots and no leases. A client of an
    earlier sidecar may have made one."""
    is_attached: bool = True
    prefill_tokens_per_second: float = 0.0
    """Prefill speed that the engine reported last; 0: not known yet."""
    later_private_reason: str = ""
    """Why the engine's keys became private after the Hello; empty: they did not."""
    transfer: ChosenCopier = _NOTHING_TO_COPY
    """Present copier of the client's stores."""
    pins: PinStatus | None = None
    """Amount of its column that its CUDA driver has pinned; None: the client has not reported it."""
    released_round: int = 0
    """Last release round that the client answered."""

    @property
    def chunk_seconds(self) -> float:
        """Seconds that the engine takes to compute one chunk; 0.0: not known yet."""
        rate = self.prefill_tokens_per_second
        return self.peer.hello.geometry.chunk_tokens / rate if rate else 0.0

    @property
    def private_reason(self) -> str:
        """Why other engines can't find what this engine stores; empty if they can."""
        return self.later_private_reason or self.peer.hello.private_reason

    @property
    def name(self) -> str:
        """Description of the worker for messages."""
        hello = self.peer.hello
        return f"the worker of column {hello.column}, pid {hello.pid}"

    @property
    def state(self) -> str:
        """State of the client for messages."""
        return "attached" if self.is_attached else "lost, not proven dead"

    def check_epoch(self, epoch: int) -> None:
        """Raise CallRefusedError unless the stream is open and ``epoch`` is its epoch."""
        if not self.is_attached or epoch != self.epoch:
            reason = f"the present epoch is {self.epoch}" if self.is_attached else "its stream has ended"
            raise precondition(f"epoch {epoch} is over, {reason}: attach again", service.REASON_ATTACH_AGAIN)


class Clients:
    """All clients of one sidecar."""

    def __init__(
        self,
        locks_directory: Path,
        make_probe: Callable[[Path], LockProbe] = LockProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory: MemoryTier | None = None
        """Memory tier that holds the clients' slots; None while the arena has no format."""
        self.by_uuid: dict[bytes, Client] = {}
        self.previous: set[bytes] = set()
        """Clients of an earlier sidecar that may still use adopted rows."""
        self.on_detached: Callable[[Client], None] = lambda _: None
        """Callback for the end of a client's stream."""
        self.on_engine_dead: Callable[[bytes], None] = lambda _: None
        """Callback for the end of an engine: all of its clients are dead. Gets the engine's UUID."""
        self.monitor = LivenessMonitor(self._on_dead, clock)
        self._clock = clock
        self._locks_directory = locks_directory
        self._make_probe = make_probe
        self._last_epoch = 0

    def find_previous(self) -> None:
        """Watch the clients of an earlier sidecar by their lock files."""
        for uuid, probe in probes_in(self._locks_directory).items():
            self.previous.add(uuid)
            self.monitor.watch(uuid, probe)

    def probe(self, peer: ParsedHello) -> LockProbe:
        """Open the client's lock file. Raises CallRefusedError unless the client holds its lock."""
        path = self._locks_directory / f"{peer.uuid.hex()}.lock"
        try:
            probe = self._make_probe(path)
        except OSError as error:
            raise precondition(f"the client's lock file can't be opened ({error}): create it") from error
        if not probe.is_held():
            probe.close()
            raise precondition(f"no other process holds the record lock on {path}: take it, then attach")
        return probe

    def check_admissible(self, peer: ParsedHello) -> None:
        """Raise CallRefusedError at MAX_CLIENTS, or if the client contradicts others or its former self."""
        known = self.by_uuid.get(peer.uuid)
        if known is not None and known.peer.engine != peer.engine:
            raise precondition("this client_uuid has another engine_uuid: attach with a new client_uuid")
        if len(self.by_uuid) >= MAX_CLIENTS and known is None:
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the sidecar has {MAX_CLIENTS} clients already, attached or lost but not proven dead:"
                " stop engines of this pod, or processes that use its socket without being engines",
            )
        if any(other.layout != peer.layout for other in self._peers(peer.engine)):
            raise precondition("another client of this engine_uuid has another namespace or geometry")

    def admit(self, peer: ParsedHello, probe: LockProbe) -> Client:
        """Attach a client under a new epoch, and take over its probe."""
        if (older := self.by_uuid.get(peer.uuid)) is not None:
            self.detach(older)
        self.monitor.forget(peer.uuid)
        self._last_epoch = max(self._last_epoch + 1, time.time_ns())  # no earlier sidecar used it
        attached_at = self._clock() if older is None else older.attached_at
        has_called = older.has_called if older is not None else peer.uuid in self.previous
        client = Client(peer, probe, self._last_epoch, attached_at, has_called)
        self.by_uuid[peer.uuid] = client
        logger.info("Client %s attached, epoch %d: %s", peer.uuid.hex(), client.epoch, peer)
        return client

    def detach(self, client: Client) -> None:
        """Move a client whose stream ended, and its slots, to quarantine."""
        if not client.is_attached:
            return
        client.is_attached = False
        if self.memory is not None:
            self.memory.quarantine(client.peer.uuid)
        self.on_detached(client)
        self.monitor.watch(client.peer.uuid, client.probe)
        logger.info("Client %s lost, epoch %d: now in quarantine", client.peer.uuid.hex(), client.epoch)

    def note_drained(self, client: Client, message: pb.Drained) -> None:
        """Free the slots of a client's older epochs: none of its copies uses them any more."""
        client.check_epoch(message.epoch)
        self._free(client.peer.uuid)

    def caller(self, request: ClientCall) -> Client:
        """Return the calling client. Raises CallRefusedError unless it is attached with this epoch."""
        client = self.by_uuid.get(request.client_uuid)
        if client is None or not client.is_attached:
            raise precondition("this client is not attached: attach again", service.REASON_ATTACH_AGAIN)
        client.check_epoch(request.epoch)
        client.has_called = True
        return client

    @property
    def holders(self) -> list[Client]:
        """Clients that hold the arena's format: they have made a call, or attached a short time ago."""
        oldest = self._clock() - HOLD_SECONDS
        return [c for c in self.by_uuid.values() if c.has_called or c.attached_at > oldest]

    def calling_worker(self, request: ClientCall) -> ParsedHello:
        """Return the calling worker. Raises CallRefusedError as ``caller`` does, and for a scheduler."""
        peer = self.caller(request).peer
        if not peer.is_worker:
            raise precondition("only a worker can store: this client is attached as the scheduler")
        return peer

    def first_holder(self, round_: int) -> str:
        """Describe a client that may still use or pin memory that is not ready any more; empty: none."""
        if self.previous:
            return f"{len(self.previous)} clients from before the sidecar's restart, which may still run"
        workers = (client for client in self.by_uuid.values() if client.peer.is_worker)
        late = [w for w in workers if not w.is_attached or w.released_round != round_]
        return "".join(f"{worker.name} ({worker.state})" for worker in late[:1])

    @property
    def private_reason(self) -> str | None:
        """Why other engines can't find what an attached engine stores; None if no engine is attached."""
        reasons = [client.private_reason for client in self.by_uuid.values() if client.is_attached]
        return max(reasons, default=None)

    def num_gpus(self, engine: bytes) -> int:
        """Return the GPUs of an engine: its workers that may have one; 1 if none is attached."""
        peers = [client.peer for client in self.by_uuid.values() if client.is_attached]
        workers = [peer for peer in peers if peer.is_worker and peer.engine == engine]
        return sum(peer.num_workers for peer in workers if not peer.hello.computes_on_cpu) if workers else 1

    def _peers(self, engine: bytes) -> list[ParsedHello]:
        return [client.peer for client in self.by_uuid.values() if client.peer.engine == engine]

    def free_unknown(self) -> None:
        """Free the slots of owners without a lock file: they detached, or their pod was replaced."""
        assert self.memory is not None
        for uuid in self.memory.quarantined_owners - self.previous:
            self.memory.end_quarantine(uuid)
        if not self.previous:
            self.memory.release_adopted()

    def _free(self, uuid: bytes) -> None:
        """End the quarantine of a client: nothing of its older epochs is in use any more."""
        self.previous.discard(uuid)
        if self.memory is not None:
            self.memory.end_quarantine(uuid)
            if not self.previous:
                self.memory.release_adopted()

    def _on_dead(self, uuid: bytes) -> None:
        logger.info("Client %s is dead: its slots may be reused", uuid.hex())
        self._free(uuid)
        client = self.by_uuid.pop(uuid, None)
        if client is None or self._peers(client.peer.engine):
            return
        self.on_engine_dead(client.peer.engine)
        if self.memory is not None:
            self.memory.end_leases(client.peer.engine)
