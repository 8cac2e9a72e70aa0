"""The sidecar's side of a GPU reader: its child process, messages and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Set

from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import MessageError, MessageKind

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 4096
_FINAL_SECONDS = 0.5
"""Extra time after a deadline: if this process was paused, the answer may wait to be read already."""


class ReaderProcess:
    """One reader process. Requests have deadlines; a reader that misses one is killed."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        incoming: asyncio.StreamReader,
        outgoing: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self.verdict = ""
        """Reason why the reader was killed, or the reason that it reported before it ended."""
        self.is_ending = False
        """True once the reader was killed, or has sent its last message."""
        self._process = process
        self._incoming, self._outgoing = incoming, outgoing
        self._deadlines: dict[tuple[MessageKind, int], asyncio.TimerHandle] = {}
        self._pinned_at = -math.inf  # time of the last report that the reader has registered memory
        self._logging = asyncio.create_task(self._log())

    @classmethod
    async def start(cls, gpu_uuid: str, arena_fd: int, pids: Callable[[], Set[int]]) -> ReaderProcess:
        """Start a reader whose process id differs from all ``pids``. Raises OSError."""
        rejected: list[ReaderProcess] = []
        try:
            while (reader := await cls._spawn(gpu_uuid, arena_fd)).pid in pids():
                rejected.append(reader)  # it stays alive, so that the next reader gets another id
            return reader
        finally:
            for unusable in rejected:
                unusable.kill("the reader of its GPU has the same process id as an engine")
                await unusable.reap()

    @classmethod
    async def _spawn(cls, gpu_uuid: str, arena_fd: int) -> ReaderProcess:
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
                start_new_session=True,  # Ctrl-C in a terminal must reach only the sidecar
                limit=_MAX_LINE_BYTES,
            )  # fmt: skip
            on_error.pop_all()
        return cls(process, *await asyncio.open_connection(sock=ours))

    def ask(self, kind: MessageKind, number: int, body: bytes, answer: MessageKind, seconds: float) -> None:
        """Send a request; kill the reader if ``answer`` does not arrive within ``seconds``.

        While the reader registers memory, copies may wait for the driver. Each registration therefore starts
        the time of a copy again.
        """
        self.send(kind, number, body)
        loop = asyncio.get_running_loop()

        def late(is_final: bool = False) -> None:
            left = self._pinned_at + seconds - loop.time() if kind is MessageKind.COPY else 0.0
            if is_final and left <= 0:
                self.kill(f"the reader of its GPU did not answer {kind.name} within {seconds:g} s")
            else:
                self._deadlines[answer, number] = loop.call_later(max(left, _FINAL_SECONDS), late, left <= 0)

        self._deadlines[answer, number] = loop.call_later(seconds, late)

    def send(self, kind: MessageKind, number: int, body: bytes = b"") -> None:
        """Send a message that needs no answer."""
        self._outgoing.write(messages.pack(kind, number, body))

    async def receive(self) -> tuple[MessageKind, int, str] | None:
        """Wait for a message and return its kind, number and reason; None: the reader ended or was killed."""
        try:
            head = await self._incoming.readexactly(messages.HEAD.size)
            kind, num_bytes, number = messages.parse_head(head)
            reason = (await self._incoming.readexactly(num_bytes)).decode(errors="replace")
        except (asyncio.IncompleteReadError, OSError):
            self.is_ending = True
            return None
        except MessageError as error:
            self.kill(f"the reader of its GPU sent an invalid message: {error}")
            return None
        if (deadline := self._deadlines.pop((kind, number), None)) is not None:
            deadline.cancel()
        if kind == MessageKind.PINNED:
            self._pinned_at = asyncio.get_running_loop().time()
        elif kind == MessageKind.FAILED:
            self.verdict, self.is_ending = self.verdict or reason, True
            return None
        return kind, number, reason

    def kill(self, verdict: str) -> None:
        """Kill the reader at once. The first ``verdict`` is kept."""
        self.verdict, self.is_ending = self.verdict or verdict, True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def reap(self) -> str:
        """Wait until the process has ended, which ends all its copies. Returns why it ended."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._outgoing.close()
        if not self.verdict:  # the reader ends by itself
            with contextlib.suppress(asyncio.TimeoutError):
                status = await asyncio.wait_for(self._process.wait(), _FINAL_SECONDS)
                how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
                self.verdict = f"the reader of its GPU ended {how}"
        self.kill("the reader of its GPU closed its connection")
        await self._process.wait()
        await self._logging
        return self.verdict

    async def _log(self) -> None:
        """Copy the reader's output to the sidecar's log, line by line."""
        output = self._process.stdout
        assert output is not None
        while True:
            try:
                line = await output.readline()
            except ValueError:  # the line is longer than the limit, and is skipped
                continue
            if not line:
                return
            logger.warning("Reader %d: %s", self.pid, line.decode(errors="replace").rstrip())
