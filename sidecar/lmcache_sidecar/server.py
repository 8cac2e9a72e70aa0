"""The gRPC server of the sessions: one asyncio loop, a UNIX socket, statuses with sentences."""

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

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.clients.validation import RefusedError, invalid, parse_pinned
from lmcache_sidecar.config import ConfigError
from lmcache_sidecar.sessions import Sessions, store_copier
from lmcache_sidecar.stats import CallStats

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_Context = grpc.aio.ServicerContext[Any, Any]

_OPTIONS = [
    ("grpc.max_receive_message_length", service.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # answers are bounded by what was asked
]


class Server:
    """Serves ``sessions`` on ``socket_path`` from ``start`` to ``stop``."""

    def __init__(self, sessions: Sessions, socket_path: str, calls: CallStats) -> None:
        self._sessions = sessions
        self._socket_path = socket_path
        self._calls = calls
        self._server: grpc.aio.Server | None = None
        self._news = asyncio.Event()  # replaced whenever it was set

    @property
    def is_listening(self) -> bool:
        """True from start to stop."""
        return self._server is not None

    async def start(self) -> None:
        """Listen. Raises ConfigError when the socket can't be made."""
        server = grpc.aio.server(options=_OPTIONS)
        methods = {
            method.name: self._unary(method, getattr(self._sessions, _snake_case(method.name)))
            for method in service.UNARY_METHODS
        }
        methods["Attach"] = grpc.stream_stream_rpc_method_handler(
            self._attach,
            response_serializer=pb.AttachReply.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.SERVICE, methods),))
        umask = os.umask(0o117)  # the socket is 0660 from the first moment
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
        """Tell every client what is new for it: more rows are ready, somebody else copies its stores."""
        self._news.set()
        self._news = asyncio.Event()

    def _unary(self, method: service.Method, call: Callable[[Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def work(data: bytes) -> Any:
            started = time.perf_counter()
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
        """Turn exceptions into statuses: whatever a call does, the daemon lives."""
        code = grpc.StatusCode.OK
        try:
            return await work
        except RefusedError as refused:
            code = refused.code
            metadata = ((service.REASON_METADATA, refused.reason),) if refused.reason else ()
            await context.abort(code, refused.message, trailing_metadata=metadata)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            logger.exception("%s failed", method)
            await context.abort(code, "the sidecar has a bug, see its log")
        finally:
            self._calls.count(method, code)

    async def _serve(self, context: _Context) -> None:
        """From Hello to the end of the stream, whoever ends it."""
        message = await _read(context)
        if message is None or message.WhichOneof("message") != "hello":
            raise invalid("the first message of Attach must be hello")
        client = await self._sessions.attach(message.hello)
        telling: asyncio.Task[None] | None = None
        try:
            attached = self._sessions.attached_message(client)
            await context.write(pb.AttachReply(attached=attached))
            telling = asyncio.create_task(self._tell_news(context, client, attached))
            while (message := await _read(context)) is not None:
                if message.WhichOneof("message") == "let_go":
                    client.let_go = message.let_go.round
                elif message.WhichOneof("message") == "drained":
                    self._sessions.clients.drained(client, message.drained)
                elif message.WhichOneof("message") == "pinned":
                    client.pins = parse_pinned(message.pinned, client.peer)
                else:
                    raise invalid("after hello only drained, let_go and pinned are understood")
        finally:
            self._sessions.clients.detach(client)
            if telling is not None:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)  # a write to a lost stream is no event

    async def _tell_news(self, context: _Context, client: Client, attached: pb.Attached) -> None:
        told = attached.ready_rows, 0
        copier = pb.StoreCopier(store_copier=attached.store_copier, reason=attached.copier_reason)
        while True:
            news = self._news
            extents = self._sessions.extents(client)
            if extents != told and (extents[1] or extents[0] > told[0]):
                told = extents
                ready_rows, round_ = extents
                await context.write(pb.AttachReply(extents=pb.Extents(ready_rows=ready_rows, round=round_)))
            if (present := store_copier(client)) != copier:
                copier = present
                await context.write(pb.AttachReply(copier=copier))
            await news.wait()


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


async def _read(context: _Context) -> pb.AttachRequest | None:
    """The next message of a stream, None at its end."""
    data = await context.read()
    return _parse(pb.AttachRequest, data) if isinstance(data, bytes) else None


def _parse(kind: type[M], data: bytes) -> M:
    """Here and not in gRPC, which calls bad bytes an unknown error, with a traceback for each."""
    try:
        return kind.FromString(data)
    except DecodeError:
        logger.warning("A client sent %d bytes that are no %s", len(data), kind.__name__)
        raise invalid(f"these {len(data)} bytes are no {kind.__name__}") from None


def claim_socket(path: str) -> None:
    """Remove the socket file of a sidecar that is gone. Raises ConfigError when the path can't be used."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"--socket: {directory} is not a directory: make it, or mount a volume there")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"--socket: {path} is in the way and no socket: remove it, or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)  # a frozen sidecar with a full backlog is a live one
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass
        except OSError as error:
            raise ConfigError(f"--socket: {path} can't be looked at: {error.strerror}") from error
    raise ConfigError(f"--socket: {path} is in use by a live sidecar: stop it, or choose another path")
