"""Any message of a client is refused or carried out, and a dead client leaves no slot or lease behind.

Input: operations of several clients on a new sidecar, each a number of one byte with arguments.
``Connections`` lists them. Operations can add the identity of an attached client and the slots that it got
last, because the fuzzer cannot guess them.
"""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import NoReturn

import grpc

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.attachment import hello_message
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.copiers.copier import Mode, SidecarCopier
from lmcache_sidecar.server import Server
from lmcache_sidecar.sessions import Sessions
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.tiered.history import ChunkHistory
from lmcache_store.tiers.tiered.store import TieredStore
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target
from tests.harness.sidecar.world import FakeArena, FakeLock

MAX_OPERATIONS = 64
DEAD_SECONDS = 10.0
"""Time after which a client without its lock is dead."""
HELLO = ClientHello(
    Role.WORKER,
    engine_uuid=b"e" * 16,
    namespace=b"n" * 32,
    chunk_tokens=16,
    groups=(KVGroup(0, 16, 4096), KVGroup(1, 16, 8192, 16, GroupKind.SLIDING_WINDOW)),
    model="m",
)


def snake_case(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


class RefusedError(Exception):
    """The sidecar ended a call with a status."""


class Context:
    """The server's side of one call or stream."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.attached = pb.Attached()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> NoReturn:
        assert details
        # The bug itself is the context of this exception.
        assert code is not grpc.StatusCode.INTERNAL, details
        raise RefusedError(details)

    async def read(self) -> bytes | None:
        return await self.requests.get()

    async def write(self, reply: pb.AttachReply) -> None:
        reply.SerializeToString()
        if reply.HasField("attached"):
            self.attached = reply.attached


class Connections:
    """A new sidecar and its clients."""

    def __init__(self) -> None:
        self.now = 100.0
        FakeLock.held.clear()
        arena = FakeArena()
        clients = Clients(Path("/fuzz"), FakeLock, lambda: self.now)
        copier = SidecarCopier(Mode.AUTO, arena)

        def new_store() -> TieredStore:
            return TieredStore(arena, history=ChunkHistory(1 << 10))

        self.sessions = Sessions(arena, "/fuzz/arena", clients, copier, new_store)
        self.server = Server(self.sessions, "/fuzz/socket", CallStats())
        self.streams: list[tuple[bytes, Context, asyncio.Task[None]]] = []
        self.slots = b""

    async def run(self, source: BytesInput) -> None:
        operations = (self.call, self.call, self.call, self.attach, self.send, self.end_stream, self.die)
        await self.sessions.start()
        try:
            for _ in range(MAX_OPERATIONS):
                if source.has_more:
                    await source.choice(operations)(source)
            await self.check_end()
        finally:
            if self.sessions.store is not None:
                await self.sessions.store.close(5.0)

    async def attach(self, source: BytesInput) -> None:
        """Attach with a valid Hello, and the fields of the input merged into it."""
        uuid = bytes([source.number() % 4]) * 16
        is_worker, raw = source.flag(), source.sized()
        role = Role.WORKER if is_worker else Role.SCHEDULER
        hello = hello_message(ClientHello(**{**vars(HELLO), "role": role}), uuid)
        FakeLock.held.add(uuid.hex())
        context = Context()
        message = pb.AttachRequest(hello=hello).SerializeToString() + raw
        await context.requests.put(message)
        task = asyncio.create_task(self.server._attach(None, context))
        self.streams.append((uuid, context, task))
        await self.settle()

    async def send(self, source: BytesInput) -> None:
        """Send a message on a stream: the input's own, or a Drained of the present epoch."""
        is_drained, raw = source.flag(), source.sized()
        for _, context, _ in self.chosen(source):
            drained = pb.AttachRequest(drained=pb.Drained(epoch=context.attached.epoch))
            await context.requests.put(drained.SerializeToString() if is_drained else raw)
        await self.settle()

    async def end_stream(self, source: BytesInput) -> None:
        for stream in self.chosen(source):
            await self.end(*stream)

    async def die(self, source: BytesInput) -> None:
        for stream in self.chosen(source):
            FakeLock.held.discard(stream[0].hex())
            await self.end(*stream)
        self.pass_time()

    async def call(self, source: BytesInput) -> None:
        """Make a unary call with the input's message, and optionally the identity and slots of a client."""
        method, flags, raw = source.choice(service.UNARY_METHODS), source.number(), source.sized()
        if flags & 1 and method is not service.READ_HINTS:  # which needs no client
            for uuid, context, _ in self.chosen(source):
                raw += method.request(client_uuid=uuid, epoch=context.attached.epoch).SerializeToString()
        if flags & 2 and method in (service.COMMIT, service.ABORT):
            raw += method.request(slots=self.slots).SerializeToString()
        handler = self.server._unary(method, getattr(self.sessions, snake_case(method.name)))
        with contextlib.suppress(RefusedError):
            reply = await handler.unary_unary(raw, Context())
            handler.response_serializer(reply)
            if method is service.RESERVE:
                self.slots = reply.slots

    def chosen(self, source: BytesInput) -> list[tuple[bytes, Context, asyncio.Task[None]]]:
        """Return one stream in a list, or an empty list if there is none."""
        number = source.number()
        return [self.streams[number % len(self.streams)]] if self.streams else []

    async def end(self, _: bytes, context: Context, task: asyncio.Task[None]) -> None:
        await context.requests.put(None)
        with contextlib.suppress(RefusedError):
            await task

    async def settle(self) -> None:
        """Run the streams' tasks until they wait for the next message."""
        for _ in range(20):
            await asyncio.sleep(0)

    def pass_time(self) -> None:
        monitor = self.sessions.clients.monitor
        monitor.step()
        self.now += DEAD_SECONDS
        monitor.step()

    async def check_end(self) -> None:
        """Let all clients die. Raises AssertionError if the sidecar still holds something for one of them."""
        for stream in self.streams:
            await self.end(*stream)
        FakeLock.held.clear()
        self.pass_time()
        assert not self.sessions.clients.by_uuid
        if (store := self.sessions.store) is not None:
            assert await store.drain(5.0)
            memory = store.memory
            assert (memory.num_leased, memory.num_quarantined, len(memory.quarantined_owners)) == (0, 0, 0)
            assert not memory.vacate(0).blocked
            assert not memory.num_used


def run(data: bytes, runner: asyncio.Runner) -> None:
    async def connect() -> None:
        await Connections().run(BytesInput(data))

    runner.run(connect())


TARGET = Target(run, opened=asyncio.Runner)
