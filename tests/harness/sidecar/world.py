"""Sessions of a sidecar without sockets, processes and clocks."""

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.attachment import hello_message
from lmcache_client.rpc.hello import ClientHello, PartedHello, Role
from lmcache_sidecar.clients.registry import Client, Clients
from lmcache_sidecar.copiers.copier import Mode, SidecarCopier
from lmcache_sidecar.explain.causes import Causes
from lmcache_sidecar.sessions import Sessions
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Geometry, LookupResult
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import ChunkHistory
from lmcache_store.tiers.tiered.store import TieredStore

NUM_ROWS = 6


class FakeArena:
    """A heap arena that is formatted later, like the file."""

    path = Path("/dev/shm/arena")

    def __init__(self) -> None:
        self.geometry: Geometry | None = None
        self.ready_rows = NUM_ROWS
        self.num_rows = 0

    def check(self, geometry: Geometry) -> None:
        pass

    def format(self, geometry: Geometry, column_nodes: Sequence[int]) -> None:
        self._heap = PrivateArena(geometry, NUM_ROWS)
        self.column_nodes = column_nodes
        self.geometry, self.num_rows = geometry, NUM_ROWS

    def __getattr__(self, name: str) -> object:
        return getattr(self._heap, name)

    def table_offset(self, column: int) -> int:
        return column

    column_offset = table_offset
    index_place = (0, 1)
    is_lost = False


class FakeStore:
    """The memory tier alone."""

    def __init__(self, arena: FakeArena, clock) -> None:
        self.memory = MemoryTier(arena, clock=clock)
        self.origins: dict[bytes, str] = {}
        self.history = ChunkHistory(1 << 10)
        self.is_closed = False

    def is_memory_only(self, namespace) -> bool:
        return True

    async def adopt(self) -> None:
        for _ in self.memory.adopt():
            pass

    async def drain(self, timeout_seconds) -> bool:
        return True

    async def close(self, timeout_seconds) -> bool:
        self.is_closed = True
        return True

    def register(self, namespace, *, label, chunk_bytes) -> None:
        pass

    def lookup(
        self, lease_id, chains, *, chunk_seconds, is_hint, num_scheduled_hits, is_counted
    ) -> LookupResult:
        result = self.memory.lookup(
            lease_id, chains, is_hint=is_hint, num_found=num_scheduled_hits, is_counted=is_counted
        )
        return LookupResult(result.num_resident, result.num_leased)

    def retain(self, hold, keys, *, is_open) -> None:
        self.memory.retain(hold, keys, is_open=is_open)

    def absence(self, key, request) -> Absence:
        return Absence.EVICTED

    def when_answered(self, chains, num_hit, find) -> None:
        return None

    def reserve(self, keys, column, owner, *, length, first_chunk, request, tenant):
        return [
            self.memory.reserve(
                key, column, owner, length=length, depth=first_chunk, request=request, tenant=tenant
            )
            for key in keys
        ]

    def commit(self, slots, column, owner) -> None:
        self.memory.commit(slots, column, owner)


class FakeLock:
    """A client's record lock, by the path of its file."""

    held: ClassVar[set[str]] = set()

    def __init__(self, path) -> None:
        self.path = path.stem

    def is_held(self) -> bool:
        return self.path in self.held

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class World:
    """Sessions of a sidecar, with a clock and the clients' locks."""

    def __init__(self, tmp_path) -> None:
        self.now = 100.0
        self.arena = FakeArena()
        self.sessions = Sessions(
            self.arena,
            "/arena",
            Clients(tmp_path, FakeLock, self.clock),
            SidecarCopier(Mode.AUTO, self.arena),
            lambda: cast(TieredStore, FakeStore(self.arena, self.clock)),
        )
        self.sessions.causes = Causes(lambda _, action: action())
        asyncio.run(self.sessions.start())

    def clock(self) -> float:
        return self.now

    def attach(self, client_uuid: bytes, role: Role = Role.WORKER, **fields) -> Client:
        FakeLock.held.add(client_uuid.hex())
        defaults = {
            "engine_uuid": b"e" * 16,
            "namespace": b"n" * 32,
            "chunk_tokens": 16,
            "groups": (KVGroup(0, 16, 4096),),
        }
        hello_type = PartedHello if "num_parts" in fields else ClientHello
        hello = hello_message(hello_type(role, **(defaults | fields)), client_uuid)
        return asyncio.run(self.sessions.attach(hello))

    def reserve(self, client: Client, *numbers: int, group: int = 0) -> pb.ReserveReply:
        keys = b"".join(bytes([number]) * 64 for number in numbers)
        return self.sessions.reserve(
            pb.ReserveRequest(epoch=client.epoch, client_uuid=client.peer.uuid, keys=keys, group=group)
        )

    def lookup(self, client: Client, request_id: str, *numbers: int, **fields: Any) -> pb.LookupReply:
        keys = b"".join(bytes([number]) * 64 for number in numbers)
        request = pb.LookupRequest(
            epoch=client.epoch, client_uuid=client.peer.uuid, request_id=request_id, **fields
        )
        request.groups.add(group=0, keys=keys)
        return self.sessions.lookup(request)

    def commit(self, client: Client, slots: bytes) -> None:
        self.sessions.commit(pb.CommitRequest(epoch=client.epoch, client_uuid=client.peer.uuid, slots=slots))

    def abort(self, client: Client, slots: bytes) -> None:
        self.sessions.abort(pb.AbortRequest(epoch=client.epoch, client_uuid=client.peer.uuid, slots=slots))

    def drain(self, client: Client) -> None:
        self.sessions.clients.note_drained(client, pb.Drained(epoch=client.epoch))

    def die(self, client_uuid: bytes) -> None:
        FakeLock.held.discard(client_uuid.hex())

    def pass_time(self, seconds: float) -> None:
        self.sessions.clients.monitor.step()
        self.now += seconds
        self.sessions.clients.monitor.step()


@pytest.fixture
def world(tmp_path):
    FakeLock.held.clear()
    return World(tmp_path)


def new_uuid() -> bytes:
    return uuid.uuid4().bytes
