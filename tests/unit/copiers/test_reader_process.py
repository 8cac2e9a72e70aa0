"""The reader process: its id, its deadlines, and its lock on the arena."""

import asyncio
import os
import socket
import time
from collections.abc import Set
from types import SimpleNamespace
from typing import cast

import pytest

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import MessageKind
from lmcache_sidecar.copiers.process import ReaderProcess
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from testing.cuda import GPU
from tests.harness.loops import in_a_loop


class FirstTwoIds:
    """A set that contains the first two ids that are looked up."""

    def __init__(self) -> None:
        self.looked_up: list[int] = []

    def __contains__(self, pid: object) -> bool:
        assert isinstance(pid, int)
        self.looked_up.append(pid)
        return len(self.looked_up) <= 2


@in_a_loop
async def test_reader_is_restarted_until_its_id_differs_from_engine_ids(tmp_path):
    (tmp_path / "arena").touch()
    ids = FirstTwoIds()
    with (tmp_path / "arena").open() as arena:
        reader = await ReaderProcess.start(GPU, arena.fileno(), lambda: cast(Set[int], ids))
    assert len(set(ids.looked_up)) == 3
    assert reader.pid == ids.looked_up[2]
    for pid in ids.looked_up[:2]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    reader.kill("test ended")
    assert await reader.reap() == "test ended"


@in_a_loop
async def test_arena_stays_locked_while_a_reader_lives(tmp_path):
    """After the death of a sidecar, a copy may still write to rows, so no new sidecar may use the arena."""
    arena = ArenaFile(tmp_path / "arena", 1 << 20)
    reader = await ReaderProcess.start(GPU, arena.fileno(), set)
    arena.close()
    with pytest.raises(ArenaError, match="in use by another sidecar"):
        ArenaFile(tmp_path / "arena", 1 << 20)
    reader.kill("test ended")
    await reader.reap()
    ArenaFile(tmp_path / "arena", 1 << 20).close()


async def reader_of(process: object) -> tuple[ReaderProcess, socket.socket]:
    local, remote = socket.socketpair()
    return ReaderProcess(process, *await asyncio.open_connection(sock=local)), remote


class FakeProcess(SimpleNamespace):
    """A process that records its kill and has no output."""

    def __init__(self) -> None:
        output = asyncio.StreamReader()
        output.feed_eof()
        super().__init__(pid=1, stdout=output, killed=asyncio.Event())

    def kill(self) -> None:
        self.killed.set()


@in_a_loop
async def test_silent_reader_is_killed_but_not_because_the_sidecar_slept():
    process = FakeProcess()
    reader, other_end = await reader_of(process)
    reader.ask(MessageKind.COPY, 1, b"", MessageKind.COPIED, 0.05)
    other_end.sendall(messages.pack(MessageKind.COPIED, 1))
    time.sleep(0.3)  # noqa: ASYNC251  # real time: a frozen sidecar
    assert await reader.receive() == (MessageKind.COPIED, 1, "")
    assert not process.killed.is_set()
    reader.ask(MessageKind.COPY, 2, b"", MessageKind.COPIED, 0.05)
    await process.killed.wait()
    assert reader.verdict == "the reader of its GPU did not answer COPY within 0.05 s"
    other_end.close()
    assert await reader.receive() is None


@in_a_loop
async def test_registrations_do_not_count_for_the_deadline_of_a_copy(monkeypatch):
    """Copies wait for the driver while it registers memory."""
    process, timers = FakeProcess(), []
    reader, other_end = await reader_of(process)
    loop, now = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: now)

    def call_later(seconds, call, *arguments):
        timers.append((now + seconds, call, arguments))
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(loop, "call_later", call_later)
    reader.ask(MessageKind.COPY, 1, b"", MessageKind.COPIED, 5.0)
    for now in (4.0, 8.0, 12.0):  # noqa: B007 - the clock
        other_end.sendall(messages.pack_pinned(PinStatus(1)))
        assert await reader.receive() == (MessageKind.PINNED, 1, "0 ")
    expirations = []
    while not process.killed.is_set():
        ((now, call, arguments),) = timers
        timers.clear()
        expirations.append(now)
        call(*arguments)
    assert expirations == [5.0, 17.0, 17.5]
    other_end.close()


@in_a_loop
async def test_invalid_message_ends_the_reader():
    process = FakeProcess()
    reader, other_end = await reader_of(process)
    other_end.sendall(messages.HEAD.pack(int(MessageKind.COPIED), 1 << 30, 0))
    assert await reader.receive() is None
    assert process.killed.is_set()
    other_end.close()
