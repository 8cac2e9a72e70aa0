"""The gRPC server for engines: one asyncio loop, a UNIX socket, and errors as gRPC statuses.

``Sessions`` has the methods for the calls of ``kvcache.proto``. Each client also has one stream, Attach, on
which both sides report changes:

- **Extents**: how many rows of the cache's shared memory are ready, that is, filled with memory. If the
  memory tier shrinks, each worker must release the rows that are no longer ready. The number of this request
  is the **round**.
- **Store copier**: whether the sidecar or the engine copies the client's new KV into the shared memory.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.clients.registry import MAX_CLIENTS, Client
from lmcache_sidecar.clients.validation import CallRefusedError, invalid, parse_pinned
from lmcache_sidecar.config import ConfigError
from lmcache_sidecar.sessions import Sessions, store_copier
from lmcache_store.common.logs import Reminders
from lmcache_store.common.timing import TIMING

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_CONNECTIONS = 2 * MAX_CLIENTS
"""Limit of open connections. Each client opens one; the other half is for clients that attach again."""

MAX_STREAMS = 128
"""Limit of the calls of one connection at a time. gRPC refuses more.

Without a limit, a call of an engine waits behind thousands of calls of one client. The limit is far above
the number that an engine needs, about six: gRPC fails calls of clients that use more than half of it."""

_IDLE_SECONDS = 10.0
"""Time after which a connection without calls is closed. An attached client always has one: its stream."""

_OPTIONS = [
    ("grpc.max_receive_message_length", service.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # requests bound the size of their answers
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_connection_idle_ms", int(_IDLE_SECONDS * 1000)),
]


class Server:
    """Serves ``sessions`` on ``socket_path`` from ``start`` to ``stop``."""

    def __init__(self, sessions: Sessions, socket_path: str, calls: CallStats) -> None:
        self._sessions = sessions
        self._socket_path = socket_path
        self._calls = calls
        self._refusals = Reminders()
        self._server: grpc.aio.Server | None = None
        self._announced = asyncio.Event()  # replaced each time it is set

    @property
    def is_listening(self) -> bool:
        """True between ``start`` and ``stop``."""
        return self._server is not None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the socket can't be created."""
        hello_ms = int(TIMING.greeting_seconds * 1000)
        server = grpc.aio.server(options=[*_OPTIONS, ("grpc.server_handshake_timeout_ms", hello_ms)])
        methods = {
            method.name: self._unary(method, getattr(self._sessions, _snake_case(method.name)))
            for method in service.UNARY_METHODS
        }
        methods["Attach"] = grpc.stream_stream_rpc_method_handler(
            self._attach, response_serializer=pb.AttachReply.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.SERVICE, methods),))
        umask = os.umask(0o117)  # the socket must have mode 0660 from its creation on
        try:
            server.add_insecure_port(f"unix:{self._socket_path}")
        except RuntimeError as error:
            raise ConfigError(f"--socket: can't listen on {self._socket_path}: {error}") from error
        finally:
            os.umask(umask)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End all streams and take no more calls."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=None)

    def announce(self) -> None:
        """Send all clients their changes: more or fewer ready rows, or another store copier."""
        self._announced.set()
        self._announced = asyncio.Event()

    def _unary(self, method: service.Method, call: Callable[[Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def work(data: bytes) -> Any:
            started = time.perf_counter()
            self._sessions.check_arena()
            reply = call(_parse(method.request, data))
            if inspect.isawaitable(reply):
                reply = await reply
            self._calls.observe(method.name, time.perf_counter() - started)
            return reply

        async def handle(data: bytes, context: _Context) -> Any:
            return await self._answer(method.name, context, work(data))

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=method.reply.SerializeToString)

    async def _attach(self, _: object, context: _Context) -> None:
        await self._answer("Attach", context, self._serve(context))

    async def _answer(self, method: str, context: _Context, work: Awaitable[T]) -> T:
        """Turn exceptions into statuses, so that no call can end the sidecar."""
        code = grpc.StatusCode.OK
        try:
            return await work
        except CallRefusedError as refused:
            code = refused.code
            metadata = ((service.REASON_METADATA, refused.reason),) if refused.reason else ()
            await context.abort(code, refused.message, trailing_metadata=metadata)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            logger.exception("%s failed", method)
            await context.abort(code, f"{method} failed: this is a bug, see the sidecar's log")
        finally:
            self._calls.count(method, code)

    async def _serve(self, context: _Context) -> None:
        """Serve one client from Hello to the end of its stream."""
        hello = await _read_hello(context)
        try:
            client = await self._sessions.attach(hello)
        except CallRefusedError as refused:
            about = f"Refused a client: pid {hello.pid}, model {hello.model[:200]!r}: {refused}"
            if self._refusals.is_due(about):  # clients attach again and again
                logger.warning("%s", about)
            raise
        sending: asyncio.Task[None] | None = None
        try:
            attached = self._sessions.attached_message(client)
            await context.write(pb.AttachReply(attached=attached))
            sending = asyncio.create_task(self._send_changes(context, client, attached))
            while (message := await _read(context)) is not None:
                if message.WhichOneof("message") == "extents_released":
                    client.released_round = message.extents_released.round
                elif message.WhichOneof("message") == "drained":
                    self._sessions.clients.note_drained(client, message.drained)
                elif message.WhichOneof("message") == "pinned":
                    client.pins = parse_pinned(message.pinned, client.peer)
                else:
                    raise invalid("after hello, Attach accepts only drained, extents_released and pinned")
        finally:
            self._sessions.detach(client)
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)  # writing to a lost stream may fail

    async def _send_changes(self, context: _Context, client: Client, attached: pb.Attached) -> None:
        """Send new extents and a new store copier to one client, until the task is cancelled."""
        last_extents = attached.ready_rows, 0
        copier = pb.StoreCopier(store_copier=attached.store_copier, reason=attached.copier_reason)
        while client.is_attached:
            announced = self._announced
            extents = self._sessions.extents(client)
            # Without a round, a client needs to hear only of more rows.
            if extents != last_extents and (extents[1] or extents[0] > last_extents[0]):
                last_extents = extents
                ready_rows, round_ = extents
                await context.write(pb.AttachReply(extents=pb.Extents(ready_rows=ready_rows, round=round_)))
            if (present := store_copier(client)) != copier:
                copier = present
                await context.write(pb.AttachReply(copier=copier))
            await announced.wait()


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


async def _read_hello(context: _Context) -> pb.Hello:
    """Read the first message of a stream. Raises CallRefusedError unless a Hello arrives in time."""
    try:
        message = await asyncio.wait_for(_read(context), TIMING.greeting_seconds)
    except asyncio.TimeoutError:
        sentence = f"no hello arrived in {TIMING.greeting_seconds:g} s: send it as soon as the stream is open"
        raise CallRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, sentence) from None
    if message is None or message.WhichOneof("message") != "hello":
        raise invalid("the first message of Attach must be hello")
    return message.hello


async def _read(context: _Context) -> pb.AttachRequest | None:
    """Read the next message of a stream; None at its end."""
    data = await context.read()
    return _parse(pb.AttachRequest, data) if isinstance(data, bytes) else None


def _parse(kind: type[M], data: bytes) -> M:
    """Parse a message. gRPC's own parser reports bad bytes as unknown errors, with a traceback for each."""
    try:
        return kind.FromString(data)
    except DecodeError:
        logger.warning("A client sent %d bytes that are not a valid %s", len(data), kind.__name__)
        raise invalid(f"the {len(data)} bytes of this message are not a valid {kind.__name__}") from None


def claim_socket(path: str) -> None:
    """Remove the socket file of a sidecar that has ended. Raises ConfigError if the path can't be used."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"--socket: {directory} is not a directory: create it, or mount a volume there")
    if problem := service.directory_problem(directory):
        raise ConfigError(f"--socket: {problem}")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"--socket: {path} exists and is not a socket: remove it, or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)  # a frozen sidecar with a full backlog is still alive
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass
        except OSError as error:
            raise ConfigError(f"--socket: {path} can't be checked: {error.strerror}") from error
    raise ConfigError(f"--socket: {path} is in use by a live sidecar: stop it, or choose another path")
