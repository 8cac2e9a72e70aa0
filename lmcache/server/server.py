"""A server of the lm:// protocol (``lmcache.protocol``), with one thread per client.

The server is safe against faulty clients:

- After an invalid head, an unknown command or a length out of bounds, it replies with code 400 and closes the
  connection.
- It stores a payload only when it is complete. A client that dies during a transfer changes nothing.
- It closes a connection if a message takes too long, or if the client is idle for ``idle_seconds``.
- The incomplete payloads of all clients together have at most ``max_object_bytes``; further transfers wait.
- It serves at most ``max_clients`` clients. A new client replaces the client that has been idle longest.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from lmcache.logging import init_logger
from lmcache.protocol import MAX_LENGTH, ClientMetaMessage, Constants, ServerMetaMessage, TimedStream
from lmcache.server.server_storage_backend import CreateStorageBackend
from lmcache_store.tiers.header import Buffer

logger = init_logger(__name__)

_GRACE_SECONDS = 10.0  # for replies that are being sent when the server stops
_REPLACE_SECONDS = 1.0  # for a client to disconnect when another one replaces it
_PAUSE_SECONDS = 0.1  # if the system has no descriptor or memory for another connection


class LMCacheServer:
    """A server that listens as soon as it is created; ``run`` serves clients.

    ``device`` is "cpu" or a directory. If the argument ``port`` is 0, the system chooses a free port; the
    attribute ``port`` is the actual one. Raises OSError if the server can't listen, and the exceptions of
    ``CreateStorageBackend``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        device: str,
        *,
        max_size_gb: float | None = None,
        max_object_bytes: int = 1 << 30,
        max_clients: int = 256,
        timeout_seconds: float = 30.0,
        idle_seconds: float = 600.0,
    ) -> None:
        self._max_object_bytes = max_object_bytes
        self._max_clients = max_clients
        self._timeout = timeout_seconds
        self._idle_seconds = idle_seconds
        self._is_stopping = False
        self._incomplete = _Budget(max_object_bytes)
        self._changed = threading.Condition()
        # protected by _changed
        self._clients: set[TimedStream] = set()
        self._idle: dict[TimedStream, None] = {}  # clients without a running request, the longest idle first
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        try:
            self.data_store = CreateStorageBackend(device, max_size_gb, max_object_bytes)
        except BaseException:
            self._listener.close()
            raise

    def run(self) -> None:
        """Serve clients until ``stop``. Then complete running requests, and close the storage."""
        try:
            while not self._is_stopping:
                self._accept()
        finally:
            self._finish()

    def stop(self) -> None:
        """Make ``run`` return. Thread-safe."""
        self._is_stopping = True
        with contextlib.suppress(OSError):  # the listener is closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            stream = TimedStream(connection, self._timeout)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no further thread can be started
            if not self._is_stopping:
                logger.warning("Cannot accept another client: %s", error)
                time.sleep(_PAUSE_SECONDS)

    def _finish(self) -> None:
        self._listener.close()
        with self._changed:
            for stream in self._clients:
                stream.end_reading()
            self._changed.wait_for(lambda: not self._clients, _GRACE_SECONDS)
        self.data_store.close()

    def _serve(self, stream: TimedStream) -> None:
        try:
            is_admitted = self._admit(stream)
            while is_admitted and self._wait(stream) and self._answer(stream):
                pass
        except (OSError, MemoryError) as error:
            logger.info("Closed the connection to a client: %s", error)
        finally:
            stream.close()
            with self._changed:
                self._clients.discard(stream)
                self._changed.notify_all()

    def _admit(self, stream: TimedStream) -> bool:
        """Register a new client, if necessary in place of an idle one.

        Returns False if there are too many clients.
        """
        with self._changed:
            if len(self._clients) >= self._max_clients and self._idle:
                longest_idle = next(iter(self._idle))
                del self._idle[longest_idle]
                longest_idle.end_reading()
                self._changed.wait_for(lambda: len(self._clients) < self._max_clients, _REPLACE_SECONDS)
            is_admitted = len(self._clients) < self._max_clients and not self._is_stopping
            if is_admitted:
                self._clients.add(stream)
            return is_admitted

    def _wait(self, stream: TimedStream) -> bool:
        """Wait for a request. Returns False if the client is idle for too long or disconnects."""
        with self._changed:
            self._idle[stream] = None
        try:
            return stream.wait(self._idle_seconds)
        finally:
            with self._changed:
                self._idle.pop(stream, None)

    def _answer(self, stream: TimedStream) -> bool:
        """Receive and answer one request. Returns False if it was invalid."""
        try:
            request = ClientMetaMessage.deserialize(stream.receive(ClientMetaMessage.packlength()))
            if request.length > self._max_object_bytes:
                raise ValueError(f"an object of {request.length} bytes exceeds {self._max_object_bytes}")
            if request.command == Constants.CLIENT_PUT:
                with self._incomplete.reserve(request.length, 2 * self._timeout):  # transfers end sooner
                    self.data_store.put(request.key, stream.receive(request.length))
            else:
                _reply(stream, self._result(request))
        except ValueError as error:
            logger.warning("Refused a request and closed its connection: %s", error)
            _reply(stream, None)
            return False
        return True

    def _result(self, request: ClientMetaMessage) -> Buffer | None:
        """Return the payload of the reply, or None for a failure.

        Raises ValueError for an unknown command.
        """
        if request.command == Constants.CLIENT_GET:
            return self.data_store.get(request.key)
        if request.command == Constants.CLIENT_EXIST:
            return b"" if self.data_store.contains(request.key) else None
        if request.command == Constants.CLIENT_LIST:
            key_list = "\n".join(self.data_store.list_keys()).encode()
            return key_list if len(key_list) <= MAX_LENGTH else None
        raise ValueError(f"unknown command {request.command}")


class _Budget:
    """A number of bytes that several threads share."""

    def __init__(self, num_bytes: int) -> None:
        self._changed = threading.Condition()
        self.num_free = num_bytes  # protected by _changed
        self.num_waiting = 0

    @contextlib.contextmanager
    def reserve(self, num_bytes: int, seconds: float) -> Iterator[None]:
        """Reserve bytes for the ``with`` block. Raises ValueError if they are not free within ``seconds``."""
        with self._changed:
            self.num_waiting += 1
            is_free = self._changed.wait_for(lambda: self.num_free >= num_bytes, seconds)
            self.num_waiting -= 1
            if not is_free:
                raise ValueError(f"no memory for {num_bytes} bytes: too many transfers are incomplete")
            self.num_free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.num_free += num_bytes
                self._changed.notify_all()


def _reply(stream: TimedStream, payload: Buffer | None) -> None:
    if payload is None:
        stream.send(ServerMetaMessage(Constants.SERVER_FAIL, 0).serialize())
    else:
        stream.send(ServerMetaMessage(Constants.SERVER_SUCCESS, len(payload)).serialize(), payload)
