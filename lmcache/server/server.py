"""A server of the lm:// protocol (``lmcache.protocol``): a thread per client.

**What a peer may do.** Anything: a head that is none, an unknown command or a length out of bounds is
answered with code 400 and the end of the connection; a payload is stored when it is complete, so a client
that dies in the middle changes nothing; a message that takes too long ends its connection, and so does
silence for ``idle_seconds``. Payloads that are not complete yet take ``max_object_bytes`` at most, those of
all clients together: others wait. There are at most ``max_clients``: of those that ask nothing at the moment
the one that has been silent longest makes room for a new one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from lmcache.logging import init_logger
from lmcache.protocol import MAX_LENGTH, ClientMetaMessage, Constants, ServerMetaMessage, Stream
from lmcache.server.server_storage_backend import CreateStorageBackend
from lmcache.tiers.header import Buffer

logger = init_logger(__name__)

_GRACE_SECONDS = 10.0  # for replies that are being sent when the server stops
_ROOM_SECONDS = 1.0  # for a client that is to make room for another
_PAUSE_SECONDS = 0.1  # when the system has no descriptor or memory for another connection


class LMCacheServer:
    """Listens from the moment it is made; ``run`` serves. ``port`` is the real one (0 picks one).

    ``device``: "cpu" or a directory. Raises OSError when it can't listen, and what CreateStorageBackend
    raises.
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
        self._unfinished = _Room(max_object_bytes)
        self._changed = threading.Condition()
        # protected by _changed
        self._clients: set[Stream] = set()
        self._idle: dict[Stream, None] = {}  # of these, who asks nothing; the longest silent first
        self._listener = socket.create_server((host, port), family=_family(host, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        try:
            self.data_store = CreateStorageBackend(device, max_size_gb, max_object_bytes)
        except BaseException:
            self._listener.close()
            raise

    def run(self) -> None:
        """Serve until ``stop``; then let clients finish what they began, and close the storage."""
        try:
            while not self._is_stopping:
                self._accept()
        finally:
            self._finish()

    def stop(self) -> None:
        """Let ``run`` return. May be called by any thread."""
        self._is_stopping = True
        with contextlib.suppress(OSError):  # has ended already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            stream = Stream(connection, self._timeout)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
        except (OSError, RuntimeError) as error:  # RuntimeError: there can't be another thread
            if not self._is_stopping:
                logger.warning("can't take another client: %s", error)
                time.sleep(_PAUSE_SECONDS)

    def _finish(self) -> None:
        self._listener.close()
        with self._changed:
            for stream in self._clients:
                stream.end_reading()
            self._changed.wait_for(lambda: not self._clients, _GRACE_SECONDS)
        self.data_store.close()

    def _serve(self, stream: Stream) -> None:
        try:
            is_welcome = self._welcome(stream)
            while is_welcome and self._wait(stream) and self._answer(stream):
                pass
        except (OSError, MemoryError) as error:
            logger.info("a client is gone: %s", error)
        finally:
            stream.close()
            with self._changed:
                self._clients.discard(stream)
                self._changed.notify_all()

    def _welcome(self, stream: Stream) -> bool:
        with self._changed:
            if len(self._clients) >= self._max_clients and self._idle:
                silent = next(iter(self._idle))
                del self._idle[silent]
                silent.end_reading()
                self._changed.wait_for(lambda: len(self._clients) < self._max_clients, _ROOM_SECONDS)
            is_welcome = len(self._clients) < self._max_clients and not self._is_stopping
            if is_welcome:
                self._clients.add(stream)
            return is_welcome

    def _wait(self, stream: Stream) -> bool:
        """Wait for a request. False: none will come."""
        with self._changed:
            self._idle[stream] = None
        try:
            return stream.wait(self._idle_seconds)
        finally:
            with self._changed:
                self._idle.pop(stream, None)

    def _answer(self, stream: Stream) -> bool:
        """Serve one request. False: it was none."""
        try:
            request = ClientMetaMessage.deserialize(stream.receive(ClientMetaMessage.packlength()))
            if request.length > self._max_object_bytes:
                raise ValueError(f"an object of {request.length} bytes is too large")
            if request.command == Constants.CLIENT_PUT:
                with self._unfinished.taken(request.length, 2 * self._timeout):  # others end first
                    self.data_store.put(request.key, stream.receive(request.length))
            else:
                _reply(stream, self._found(request))
        except ValueError as error:
            logger.warning("a client is refused: %s", error)
            _reply(stream, None)
            return False
        return True

    def _found(self, request: ClientMetaMessage) -> Buffer | None:
        """Return what to reply with; None: no. Raises ValueError for an unknown command."""
        if request.command == Constants.CLIENT_GET:
            return self.data_store.get(request.key)
        if request.command == Constants.CLIENT_EXIST:
            return b"" if self.data_store.contains(request.key) else None
        if request.command == Constants.CLIENT_LIST:
            listed = "\n".join(self.data_store.list_keys()).encode()
            return listed if len(listed) <= MAX_LENGTH else None
        raise ValueError(f"there is no command {request.command}")


class _Room:
    """Bytes that several may take parts of."""

    def __init__(self, num_bytes: int) -> None:
        self._changed = threading.Condition()
        self.num_free = num_bytes  # protected by _changed
        self.num_waiting = 0

    @contextlib.contextmanager
    def taken(self, num_bytes: int, seconds: float) -> Iterator[None]:
        """Take a part for the ``with`` block; raises ValueError when there is not so much in time."""
        with self._changed:
            self.num_waiting += 1
            is_free = self._changed.wait_for(lambda: self.num_free >= num_bytes, seconds)
            self.num_waiting -= 1
            if not is_free:
                raise ValueError(f"there is no room for {num_bytes} bytes: too much is on its way")
            self.num_free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.num_free += num_bytes
                self._changed.notify_all()


def _reply(stream: Stream, payload: Buffer | None) -> None:
    if payload is None:
        stream.send(ServerMetaMessage(Constants.SERVER_FAIL, 0).serialize())
    else:
        stream.send(ServerMetaMessage(Constants.SERVER_SUCCESS, len(payload)).serialize(), payload)


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
