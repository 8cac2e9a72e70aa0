"""Connector for lm://, the library's own server (``lmcache.server``)."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import threading
from collections.abc import Sequence

from lmcache.protocol import MAX_KEY_LENGTH, ClientMetaMessage, Constants, ServerMetaMessage, TimedStream
from lmcache.storage_backend.connector.base_connector import RemoteBytesConnector
from lmcache.utils import CacheEngineKey
from lmcache_store.tiers.circuit import Circuit

_CONNECT_SECONDS = 2.0
_TIMEOUT_SECONDS = 3.0  # per message; protocol.Stream adds time for large payloads
_MAX_BATCH = 8  # requests that fit one packet: servers of LMCache 0.1-0.3 need a request in one recv()


class LMCServerConnector(RemoteBytesConnector):
    """A connector with one connection, which it opens at the first use and reopens after a failure.

    A lock is held from the first byte of a request to the last byte of its reply, so that threads never read
    each other's replies. A key that is too long for the protocol is replaced by a shorter name
    (``wire_name``).

    After a failure, all calls fail immediately until a probe can connect to the server again.
    """

    def __init__(self, host: str, port: int, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._address = (host, port)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()  # protects what follows
        self._stream: TimedStream | None = None
        self._circuit = Circuit(f"lm server {host}:{port}", self._probe)

    def exists(self, key: str) -> bool:
        """See RemoteConnector."""
        return self._call(_head(Constants.CLIENT_EXIST, key)) is not None

    def get(self, key: str) -> bytes | None:
        """See RemoteConnector."""
        return self._call(_head(Constants.CLIENT_GET, key))

    def set(self, key: str, obj: bytes) -> None:
        """See RemoteConnector. PUT has no reply, so an EXIST request after it checks the result."""
        put = _head(Constants.CLIENT_PUT, key, memoryview(obj).nbytes)
        if self._call(put, obj, _head(Constants.CLIENT_EXIST, key)) is None:
            raise ValueError(f"the server did not take {key!r}: the object does not fit its storage")

    def list(self) -> list[str]:
        """See RemoteConnector."""
        names = self._call(_head(Constants.CLIENT_LIST, "")) or b""
        return names.decode(errors="surrogateescape").split("\n") if names else []

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        """See RemoteConnector."""
        return [answer is not None for answer in self._call_many(Constants.CLIENT_EXIST, keys)]

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See RemoteConnector."""
        return self._call_many(Constants.CLIENT_GET, keys)

    def close(self) -> None:
        """See RemoteConnector."""
        self._circuit.end()  # otherwise a probe would connect again
        with self._lock:
            self._disconnect()

    def _call_many(self, command: int, keys: Sequence[str]) -> Sequence[bytes | None]:
        answers: Sequence[bytes | None] = []
        for start in range(0, len(keys), _MAX_BATCH):
            heads = [_head(command, key) for key in keys[start : start + _MAX_BATCH]]
            answers = [*answers, *self._exchange(b"".join(heads), num_replies=len(heads))]
        return answers

    def _call(self, *request: bytes) -> bytes | None:
        """Send a request and return the payload of its reply, or None if the reply is a failure."""
        return self._exchange(*request, num_replies=1)[0]

    def _exchange(self, *requests: bytes, num_replies: int) -> Sequence[bytes | None]:
        self._check()
        with self._lock:
            self._check()  # another thread may have failed while this one waited for the lock
            try:
                stream = self._connected()
                stream.send(*requests)
                answers = [_receive_reply(stream) for _ in range(num_replies)]
            except (OSError, ValueError) as error:
                self._disconnect()
                self._circuit.failure()
                raise ConnectionError(f"lm server {self._address[0]}:{self._address[1]}: {error}") from error
            self._circuit.success()
            return answers

    def _check(self) -> None:
        if self._circuit.is_open:
            raise ConnectionError("the lm server is unavailable after a failure; it is being probed")

    def _probe(self) -> None:
        with self._lock:
            self._connected()

    def _connected(self) -> TimedStream:
        # A restarted server, or an unexpected reply, is detected here, before a request is lost.
        if self._stream is not None and not self._stream.is_quiet():
            self._disconnect()
        if self._stream is None:
            connection = socket.create_connection(self._address, _CONNECT_SECONDS)
            self._stream = TimedStream(connection, self._timeout)
        return self._stream

    def _disconnect(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def wire_name(key: str) -> str:
    """Return the name of a chunk's key in the protocol.

    This is the key itself. If the key is too long for the protocol, for example because the model's name is a
    path, a digest replaces the name of the model.
    """
    if len(key.encode()) <= MAX_KEY_LENGTH:
        return key
    try:
        chunk = CacheEngineKey.from_string(key)
    except ValueError:
        return key  # the protocol refuses this key later
    digest = hashlib.sha256(chunk.model_name.encode()).hexdigest()[:32]
    return dataclasses.replace(chunk, model_name=f"sha256-{digest}").to_string()


def _head(command: int, key: str, length: int = 0) -> bytes:
    return ClientMetaMessage(command, wire_name(key), length).serialize()


def _receive_reply(stream: TimedStream) -> bytes | None:
    """Receive a reply; return its payload, or None for a failure. Raises ValueError for an invalid reply."""
    reply = ServerMetaMessage.deserialize(stream.receive(ServerMetaMessage.packlength()))
    if reply.code not in (Constants.SERVER_SUCCESS, Constants.SERVER_FAIL):
        raise ValueError(f"unexpected status code {reply.code} in a reply")
    payload = stream.receive(reply.length)
    return payload if reply.code == Constants.SERVER_SUCCESS else None
