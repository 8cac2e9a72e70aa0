"""lm://: the library's own server (``lmcache.server``)."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import threading
from collections.abc import Sequence

from lmcache.protocol import MAX_KEY_LENGTH, ClientMetaMessage, Constants, ServerMetaMessage, Stream
from lmcache.storage_backend.connector.base_connector import RemoteBytesConnector
from lmcache.tiers.circuit import Circuit
from lmcache.utils import CacheEngineKey

_CONNECT_SECONDS = 2.0
_TIMEOUT_SECONDS = 3.0  # of one message; longer payloads have longer (protocol.Stream)
_MAX_AT_ONCE = 8  # requests that fit one packet: legacy servers take what one recv() brings for a whole one


class LMCServerConnector(RemoteBytesConnector):
    """One connection, made when it is first needed and again when it broke.

    A lock is held from a request's first byte to its reply's last, so that threads never read each other's
    replies. A key that the protocol has no room for goes by another name (``wire_name``).

    After a failure calls fail at once until the server can be connected to again.
    """

    def __init__(self, host: str, port: int, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._address = (host, port)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()  # protects what follows
        self._stream: Stream | None = None
        self._circuit = Circuit(f"lm server {host}:{port}", self._probe)

    def exists(self, key: str) -> bool:
        """See RemoteConnector."""
        return self._call(_head(Constants.CLIENT_EXIST, key)) is not None

    def get(self, key: str) -> bytes | None:
        """See RemoteConnector."""
        return self._call(_head(Constants.CLIENT_GET, key))

    def set(self, key: str, obj: bytes) -> None:
        """See RemoteConnector. PUT has no reply: an EXIST right behind it says whether it was stored."""
        put = _head(Constants.CLIENT_PUT, key, memoryview(obj).nbytes)
        if self._call(put, obj, _head(Constants.CLIENT_EXIST, key)) is None:
            raise ValueError(f"the server did not take {key!r}: no room")

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
        self._circuit.end()  # else a probe would connect again
        with self._lock:
            self._hang_up()

    def _call_many(self, command: int, keys: Sequence[str]) -> Sequence[bytes | None]:
        answers: Sequence[bytes | None] = []
        for start in range(0, len(keys), _MAX_AT_ONCE):
            heads = [_head(command, key) for key in keys[start : start + _MAX_AT_ONCE]]
            answers = [*answers, *self._exchange(b"".join(heads), num_replies=len(heads))]
        return answers

    def _call(self, *request: bytes) -> bytes | None:
        """Send a request and return what its reply carries; None: the reply says no."""
        return self._exchange(*request, num_replies=1)[0]

    def _exchange(self, *requests: bytes, num_replies: int) -> Sequence[bytes | None]:
        self._check()
        with self._lock:
            self._check()  # who had the lock may have found out
            try:
                stream = self._connected()
                stream.send(*requests)
                answers = [_receive_reply(stream) for _ in range(num_replies)]
            except (OSError, ValueError) as error:
                self._hang_up()
                self._circuit.failure()
                raise ConnectionError(f"lm server {self._address[0]}:{self._address[1]}: {error}") from error
            self._circuit.success()
            return answers

    def _check(self) -> None:
        if self._circuit.is_open:
            raise ConnectionError("the server is unavailable since a failure a moment ago")

    def _probe(self) -> None:
        with self._lock:
            self._connected()

    def _connected(self) -> Stream:
        # A server that restarted, or answers what nobody asked, is noticed before a request is lost on it.
        if self._stream is not None and not self._stream.is_quiet():
            self._hang_up()
        if self._stream is None:
            connection = socket.create_connection(self._address, _CONNECT_SECONDS)
            self._stream = Stream(connection, self._timeout)
        return self._stream

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def wire_name(key: str) -> str:
    """Return what a chunk's key is called on the wire: itself, or with a digest in place of the model's name
    when it is longer than the protocol allows (the path of a snapshot, say)."""
    if len(key.encode()) <= MAX_KEY_LENGTH:
        return key
    try:
        chunk = CacheEngineKey.from_string(key)
    except ValueError:
        return key  # which the protocol refuses
    digest = hashlib.sha256(chunk.model_name.encode()).hexdigest()[:32]
    return dataclasses.replace(chunk, model_name=f"sha256-{digest}").to_string()


def _head(command: int, key: str, length: int = 0) -> bytes:
    return ClientMetaMessage(command, wire_name(key), length).serialize()


def _receive_reply(stream: Stream) -> bytes | None:
    """Raises ValueError for what is no reply."""
    reply = ServerMetaMessage.deserialize(stream.receive(ServerMetaMessage.packlength()))
    if reply.code not in (Constants.SERVER_SUCCESS, Constants.SERVER_FAIL):
        raise ValueError(f"unexpected reply {reply.code}")
    payload = stream.receive(reply.length)
    return payload if reply.code == Constants.SERVER_SUCCESS else None
