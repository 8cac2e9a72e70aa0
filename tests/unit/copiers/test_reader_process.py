"""The reader process: its id, its deadlines, and the release of all resources."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from subprocess import PIPE
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import Format, MessageKind
from lmcache_sidecar.copiers.process import ReaderProcess
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry
from testing.child_process import SOURCES
from testing.cuda import GPU, Node, node
from tests.harness.light import needs
from tests.harness.loops import in_a_loop

SECONDS = 60.0
SLOT_BYTES = 4096
NUM_CLIENTS = 100


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


@needs("cuda-bindings")
def test_many_clients_leave_no_resources_behind(tmp_path):
    arena = ArenaFile(tmp_path / "arena", 1 << 20)
    arena.format(Geometry(SLOT_BYTES, 1))
    content = os.urandom(4 * SLOT_BYTES)
    with node() as gpus, exported(gpus, content) as handle:
        offer = pb.TransferOffer(
            allocations=[pb.DeviceAllocation(ipc_handle=handle, num_bytes=len(content))],
            groups=[pb.GroupPages(num_blocks=4, blocks_per_row=1, layers=[LAYER])],
        )
        asyncio.run(attach_and_detach_clients(gpus, arena, offer, content))
    arena.close()


EXPORT_PROGRAM = """
import sys
from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.ipc import export
content = bytes.fromhex(sys.argv[1])
context = Device.visible()[0].primary_context()
address = int(context.call("cuMemAlloc", len(content)))
context.call("cuMemcpyHtoD", address, content, len(content))
print(export(context, address).handle.hex(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def exported(gpus: Node, content: bytes) -> Iterator[bytes]:
    """Yield the handle of GPU memory of another process."""
    environment = os.environ | gpus.environment("engine") | {"PYTHONPATH": SOURCES}
    command = [sys.executable, "-c", EXPORT_PROGRAM, content.hex()]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment) as engine:
        assert engine.stdout is not None
        yield bytes.fromhex(engine.stdout.readline().decode())
        engine.kill()


LAYER = pb.LayerPages(page_bytes=SLOT_BYTES, block_stride=SLOT_BYTES)
RESOURCES = ("contexts", "mappings", "streams", "events", "pins", "pinned_bytes")


async def attach_and_detach_clients(gpus, arena, offer, content) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gpus.environment("reader").items():
            patch.setenv(name, value)
        reader = await ReaderProcess.start(GPU, arena.fileno(), set)

    async def request(kind: MessageKind, number: int, body: bytes, answer: MessageKind) -> None:
        reader.ask(kind, number, body, answer, SECONDS)
        while (message := await reader.receive()) is not None and message[0] == MessageKind.PINNED:
            pass  # may arrive at any time
        assert message == (answer, number, ""), reader.verdict

    arena_format = Format(SLOT_BYTES, arena.num_rows, arena.num_rows)
    await request(MessageKind.START, 0, messages.pack_start(GPU, arena_format), MessageKind.STARTED)
    column = arena.column_offset(0)
    counts = []
    for number in range(1, NUM_CLIENTS + 1):
        await request(
            MessageKind.OPEN,
            number,
            messages.pack_open(column, offer.SerializeToString()),
            MessageKind.OPENED,
        )
        row, block = number % 50, number % 4
        copies = messages.Copies(number, 0, word(column + row * SLOT_BYTES), word(block, "<u4").reshape(1, 1))
        await request(MessageKind.COPY, number, messages.pack_copies([copies]), MessageKind.COPIED)
        await request(MessageKind.CLOSE, number, b"", MessageKind.CLOSED)
        assert bytes(arena.view(row, 0)) == content[block * SLOT_BYTES : (block + 1) * SLOT_BYTES]
        if number in (1, NUM_CLIENTS):
            (process,) = gpus.processes("reader")
            counts.append({name: process[name] for name in RESOURCES})
    reader.kill("test ended")
    await reader.reap()
    assert counts[0]["mappings"] == 0
    assert counts[0] | {"pins": 1, "pinned_bytes": 0} == counts[1] | {"pins": 1, "pinned_bytes": 0}


def word(number: int, kind: str = "<u8"):
    return np.array([number], kind)
