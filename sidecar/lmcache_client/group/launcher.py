"""Sockets, signals and the process of vLLM of one part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from lmcache_client.group import part
from lmcache_client.group.channel import LEADER, MAX_LINE_BYTES, LinkError
from lmcache_client.group.links import PartLink, forward, in_time, join, welcome
from lmcache_client.group.part import GroupPart
from lmcache_client.group.settings import Settings

_RETRY_SECONDS = 1.0
_CANNOT_RUN = 126
"""Exit status of a shell for a command that cannot run."""

_Handler: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

logger = logging.getLogger(__name__)


class Launcher:
    """Turns sockets, signals and time into events of a ``GroupPart``, and runs its actions."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings, self._loop = settings, loop
        timing = settings.notice_seconds, settings.drain_seconds, settings.is_headless
        self._part = GroupPart(settings.identity, settings.address, *timing)
        self._result: asyncio.Future[part.Exit] = loop.create_future()
        self._links: dict[int, PartLink] = {}
        self._door: asyncio.Server | None = None
        self._ready_port = contextlib.ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pid = 0

    async def run(self) -> part.Exit:
        """Run vLLM while all parts are connected. Returns the exit status and the cause of the end."""
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._terminate)
        try:
            self._begin(self._gather() if self._settings.identity.rank == LEADER else self._follow())
            self._begin(self._tick())
            return await self._result
        finally:
            self._signal(signal.SIGKILL)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background. Its failure ends the launcher, and so the group."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._result.done():
            self._result.set_exception(error)

    async def _tick(self) -> None:
        while True:
            self._do(self._part.tick(self._loop.time()))
            await asyncio.sleep(part.BEAT_SECONDS)

    async def _gather(self) -> None:
        self._door = await self._listen(self._serve, self._settings.port, "wait for other parts")

    async def _listen(self, serve: _Handler, port: int, purpose: str, *more: str) -> asyncio.Server | None:
        address = self._settings.address
        try:
            return await asyncio.start_server(serve, (address, *more), port, limit=MAX_LINE_BYTES)
        except OSError as error:
            cause = f"error: cannot {purpose} at {address} port {port}: {error.strerror}"
            self._do([part.Exit(1, cause)])
            return None

    async def _follow(self) -> None:
        address = f"{self._settings.leader} port {self._settings.port}"
        while self._part.phase is part.Phase.GATHERING:
            try:
                name, link = await in_time(join(self._settings))
            except ValueError as error:
                self._part.failed(f"{address}: {error}")
            else:
                logger.info("connected to part 0 (%s)", name)
                self._admit(LEADER, name, link)
                await self._attend(LEADER, link)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a follower join. asyncio logs errors of this method, so no stranger can end the launcher."""
        try:
            identity, link = await in_time(welcome(self._settings, reader, writer))
        except ValueError as error:
            self._part.failed(f"{(writer.get_extra_info('peername') or ['?'])[0]}: {error}")
            writer.close()
            return
        if reason := self._part.refusal(identity):
            self._part.failed(f"part {identity.rank} ({identity.name}) is refused, because {reason}")
            link.send(f"refuse {reason}")
            link.close()
            return
        link.send("welcome")
        self._admit(identity.rank, identity.name, link)
        self._begin(self._attend(identity.rank, link))

    def _admit(self, rank: int, name: str, link: PartLink) -> None:
        self._links[rank] = link
        self._do(self._part.joined(rank, name, self._loop.time()))

    async def _attend(self, rank: int, link: PartLink) -> None:
        """Pass on the messages of a link until it closes."""
        try:
            while True:
                text = await link.receive()
                if self._links.get(rank) is not link:
                    break
                self._do(self._part.received(rank, text, self._loop.time()))
        except LinkError as error:
            if self._links.get(rank) is link:
                del self._links[rank]
                self._do(self._part.lost(rank, f"{error}", self._loop.time()))
        link.close()

    def _do(self, actions: Sequence[part.Action]) -> None:
        for action in [] if self._result.done() else actions:
            match action:
                case part.SendMessage(rank, text):
                    self._links[rank].send(text)
                case part.Disconnect(rank):
                    self._links.pop(rank).close()
                case part.Start(address):
                    self._start(address)
                case part.Withdraw():
                    self._ready_port.close()
                case part.Kill(number):
                    self._signal(number)
                case part.LogLine(text):
                    logger.info(text)
                case part.Exit():
                    self._result.set_result(action)

    def _start(self, address: str) -> None:
        if self._door is not None:
            self._door.close()
        command = self._settings.command_with(address)
        # Python ignores two signals, which would stay ignored in vLLM.
        defaults = (signal.SIGPIPE, signal.SIGXFSZ)
        if self._settings.is_headless:
            self._begin(self._relay(address))
        try:
            self._open_ready_port()
            self._pid = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigdef=defaults)
        except OSError as error:
            logger.error("cannot start %s: %s", command[0], error.strerror)
            self._do(self._part.exited(_CANNOT_RUN))

    def _open_ready_port(self) -> None:
        """Open the port of the readiness probe. It closes each connection at once."""
        address = self._settings.address, self._settings.ready_port
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        port = self._ready_port.enter_context(socket.create_server(address, family=family))
        port.setblocking(False)  # a client may leave before it is accepted

        def answer() -> None:
            with contextlib.suppress(OSError):
                port.accept()[0].close()

        self._loop.add_reader(port, answer)
        self._ready_port.callback(self._loop.remove_reader, port)

    async def _relay(self, leader: str) -> None:
        """Answer on the server's port as the leader does, so that probes of all pods have one result."""
        port = self._settings.server_port

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                answers, requests = await asyncio.open_connection(leader, port)
                await asyncio.gather(forward(reader, requests), forward(answers, writer))
            writer.close()

        # Probes with a command, port-forwards and other containers connect to this address.
        local = "::1" if ":" in self._settings.address else "127.0.0.1"
        # A connection takes two of these files, and containers often start with a limit of 1,024. vLLM's
        # server raises its limit, too. If probes got no connection, the kubelet would end the engine.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        await self._listen(relay, port, "answer probes", local)

    def _signal(self, number: signal.Signals) -> None:
        if self._pid:
            # SIGTERM would end the workers of vLLM before their requests.
            send = os.killpg if number is signal.SIGKILL else os.kill
            with contextlib.suppress(ProcessLookupError):
                send(self._pid, number)

    def _terminate(self) -> None:
        self._do(self._part.terminated(self._loop.time()))

    def _reap(self) -> None:
        """Collect exited processes. In a container, orphans of vLLM become children of the launcher."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._do(self._part.exited(os.waitstatus_to_exitcode(ended[1])))
