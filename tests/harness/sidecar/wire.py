"""Clients of a real sidecar, also one that sends raw messages."""

from __future__ import annotations

import hashlib
import queue
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.attachment import hello_message
from lmcache_client.rpc.client import LockFile, SidecarClient
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Slot
from testing.child_process import wait_until
from testing.processes import SidecarProcess

NAMESPACE = b"n" * 32
SEPARATE_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Option of a channel. Otherwise all channels of a process share one connection."""


def make_hello(role: Role = Role.WORKER, *, chunk_bytes: int = 100_000, **fields: Any) -> ClientHello:
    """A hello of an engine with one group of full attention."""
    defaults: dict[str, Any] = {
        "engine_uuid": b"e" * 16,
        "namespace": NAMESPACE,
        "chunk_tokens": 256,
        "groups": (KVGroup(0, block_tokens=16, chunk_bytes=chunk_bytes),),
        "model": "tiny",
    }
    return ClientHello(role, **(defaults | fields))


def make_keys(*numbers: int, namespace: bytes = NAMESPACE) -> bytes:
    """One row key for each number."""
    return b"".join(namespace + hashlib.sha256(b"%d" % number).digest() for number in numbers)


def slots_of(session: SidecarSession, keys: bytes) -> list[Slot]:
    """Slots of the leading keys, according to the index."""
    return session.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).slots()


def attached(client: SidecarClient, *, newer_than: SidecarSession | None = None) -> SidecarSession:
    """Wait for a session."""
    return wait_until(
        lambda: client.session if client.session is not newer_than else None,
        what=f"attached: {client.detached_reason}",
    )


def usable(sidecar: SidecarProcess) -> None:
    """Wait until the whole arena is populated."""
    sidecar.wait_usable()


class RawClient:
    """Sends the protocol's messages directly, so that it can send wrong ones."""

    def __init__(self, sidecar: SidecarProcess, hello: ClientHello | None = None) -> None:
        self.uuid = uuid.uuid4().bytes
        self.hello = hello_message(hello or make_hello(), self.uuid)
        self.epoch = 0
        self.sidecar = sidecar
        self.lock = LockFile(service.lock_path(sidecar.socket_path, self.uuid))
        self.lock.acquire()
        self._channel = grpc.insecure_channel(f"unix:{sidecar.socket_path}", options=SEPARATE_CONNECTION)
        self._outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._stream: Any = None

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self._channel.close()
        self.lock.release()

    def open(self, *messages: pb.AttachRequest) -> Any:
        """Open a stream with these messages. Returns its replies."""
        self._outgoing = queue.SimpleQueue()
        for message in messages:
            self._outgoing.put(message)
        attach = self._channel.stream_stream(
            service.ATTACH_PATH,
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachReply.FromString,
        )
        self._stream = attach(_until_none(self._outgoing), timeout=300)
        return self._stream

    def attach(self) -> pb.Attached:
        """Attach, and wait until all rows are populated."""
        attached: pb.Attached = next(self.open(pb.AttachRequest(hello=self.hello))).attached
        self.epoch = attached.epoch
        ready = attached.ready_rows
        while ready < attached.num_rows:
            ready = next(self._stream).extents.ready_rows
        return attached

    def send(self, **message: Any) -> None:
        """Send one more message on the stream."""
        self._outgoing.put(pb.AttachRequest(**message))

    def break_stream(self) -> None:
        """Break the stream, as if the connection was lost."""
        self._stream.cancel()
        self._outgoing.put(None)

    def call(self, method: service.Method, **fields: Any) -> Any:
        """Make one call. Raises grpc.RpcError."""
        call = self._channel.unary_unary(
            method.path,
            request_serializer=lambda message: (
                message if isinstance(message, bytes) else message.SerializeToString()
            ),
            response_deserializer=method.reply.FromString,
        )
        defaults = {"epoch": self.epoch, "client_uuid": self.uuid}
        return call(method.request(**(defaults | fields)), timeout=60)


def _until_none(messages: queue.SimpleQueue[pb.AttachRequest | None]) -> Iterator[pb.AttachRequest]:
    while (message := messages.get()) is not None:
        yield message
