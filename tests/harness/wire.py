"""Clients of a real sidecar: one that sends raw messages, and one in a process that can be killed."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from lmcache.kv_groups import KVGroup
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.attachment import hello_message
from lmcache.rpc.client import SidecarClient
from lmcache.rpc.hello import ClientHello, Role
from lmcache.rpc.lockfile import LockFile
from lmcache.rpc.session import Session
from lmcache.tiers.memory.contracts import Slot
from testing.child_process import REPOSITORY, wait_until
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


def slots_of(session: Session, keys: bytes) -> list[Slot]:
    """Slots of the leading keys, according to the index."""
    return session.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).slots()


def attached(client: SidecarClient, *, newer_than: Session | None = None) -> Session:
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
        self._sidecar = sidecar
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


class ClientProcess:
    """A worker in a separate process, which runs ``reserve``."""

    def __init__(self, socket_path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, socket_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            text=True,
        )

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def reserve(self, keys: bytes) -> list[tuple[int, int]]:
        """Reserve slots and fill half of each. Returns (row, generation) of each slot."""
        return [(row, generation) for row, generation in self._ask("reserve", keys.hex())]

    def leave(self) -> int:
        """End the process normally. Returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _ask(self, *words: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def main(socket_path: str) -> None:
    """Run the process of ``ClientProcess``: one answer for each line of standard input."""
    client = SidecarClient(socket_path, make_hello())
    client.start()
    for line in sys.stdin:
        _, keys = json.loads(line)
        session = attached(client)
        slots = wait_until(lambda: _reserve_all(session, bytes.fromhex(keys)))  # noqa: B023
        assert session.slots is not None
        for slot in slots:
            session.slots[slot.row, : session.slots.shape[1] // 2] = 0xAB
        print(json.dumps(slots), flush=True)


def _reserve_all(session: Session, keys: bytes) -> list[Any] | None:
    slots = [reservation.slot for reservation in session.reserve(0, keys)]
    return slots if all(slots) else None


if __name__ == "__main__":
    main(*map(str, map(Path, sys.argv[1:])))
