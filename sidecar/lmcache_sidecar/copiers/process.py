"""The sidecar's end of a reader: a child process, its messages and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Set

from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import Kind, MessageError

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 4096
_FINAL_SECONDS = 0.5
"""More for what hangs: it may be we who slept, and its answer is there to be read."""


class Reader:
    """One reader. What must be answered has a deadline; who misses it is killed."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        incoming: asyncio.StreamReader,
        outgoing: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self.verdict = ""
        """Why it was killed, or what it said before it ended."""
        self.is_ending = False
        """It was killed, or has said its last word."""
        self._process = process
        self._incoming, self._outgoing = incoming, outgoing
        self._deadlines: dict[tuple[Kind, int], asyncio.TimerHandle] = {}
        self._logging = asyncio.create_task(self._log())

    @classmethod
    async def start(cls, gpu_uuid: str, arena_fd: int, pids: Callable[[], Set[int]]) -> Reader:
        """Start one whose process id is none of ``pids``. Raises OSError."""
        unlike: list[Reader] = []
        try:
            while (reader := await cls._spawn(gpu_uuid, arena_fd)).pid in pids():
                unlike.append(reader)  # and alive, until the next one has another id
            return reader
        finally:
            for other in unlike:
                other.kill("its process id is an engine's, too")
                await other.reap()

    @classmethod
    async def _spawn(cls, gpu_uuid: str, arena_fd: int) -> Reader:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_error, theirs:
            on_error.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lmcache_sidecar.copiers.reader", str(theirs.fileno()), str(arena_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), arena_fd),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu_uuid},
                start_new_session=True,  # a terminal's Ctrl-C is for the sidecar
                limit=_MAX_LINE_BYTES,
            )  # fmt: skip
            on_error.pop_all()
        return cls(process, *await asyncio.open_connection(sock=ours))

    def ask(self, kind: Kind, number: int, body: bytes, answer: Kind, seconds: float) -> None:
        """Send what must be answered within so many seconds."""
        self.tell(kind, number, body)
        loop = asyncio.get_running_loop()

        def late(is_final: bool = False) -> None:
            if is_final:
                self.kill(f"its reader did not answer {kind.name} within {seconds:g} s")
            else:
                self._deadlines[answer, number] = loop.call_later(_FINAL_SECONDS, late, True)

        self._deadlines[answer, number] = loop.call_later(seconds, late)

    def tell(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send what needs no answer."""
        self._outgoing.write(messages.pack(kind, number, body))

    async def receive(self) -> tuple[Kind, int, str] | None:
        """Wait for the next message, with its reason; None: it has ended, or must be."""
        try:
            kind, num_bytes, number = messages.parse_head(
                await self._incoming.readexactly(messages.HEAD.size)
            )
            reason = (await self._incoming.readexactly(num_bytes)).decode(errors="replace")
        except (asyncio.IncompleteReadError, OSError):
            self.is_ending = True
            return None
        except MessageError as error:
            self.kill(f"its reader sent something else: {error}")
            return None
        if (deadline := self._deadlines.pop((kind, number), None)) is not None:
            deadline.cancel()
        if kind == Kind.FAILED:
            self.verdict, self.is_ending = self.verdict or reason, True
            return None
        return kind, number, reason

    def kill(self, verdict: str) -> None:
        """End it, at once."""
        self.verdict, self.is_ending = self.verdict or verdict, True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def reap(self) -> str:
        """Wait until it is no more: then nothing of it is under way. Return why it ended."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._outgoing.close()
        if not self.verdict:  # it is ending by itself
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(self._process.wait(), _FINAL_SECONDS)
                self.verdict = (
                    f"its reader ended, signal {-status}" if status < 0 else f"its reader ended: {status}"
                )
        self.kill("its reader hung up")
        await self._process.wait()
        await self._logging
        return self.verdict

    async def _log(self) -> None:
        """Its words, line by line, into the sidecar's log."""
        output = self._process.stdout
        assert output is not None
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the limit, and left out
                continue
            if not line:
                return
            logger.warning("Reader %d: %s", self.pid, line.decode(errors="replace").rstrip())
