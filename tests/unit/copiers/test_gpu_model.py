"""Model-based test of a GPU's clients, jobs and readers.

No job may end while its slots may still be written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.copiers import gpu, messages
from lmcache_sidecar.copiers.gpu import GpuCopier
from lmcache_sidecar.copiers.jobs import CopyStats, PlacedCopy
from lmcache_sidecar.copiers.members import Member
from lmcache_sidecar.copiers.messages import MessageKind
from lmcache_store.tiers.memory.contracts import Geometry
from tests.harness.scope import examples

PIDS = st.sampled_from([100, 101, 200, 201, 202, 203])


class FakeReader:
    """A reader that answers when the model says so.

    Slots of its copies may be written until it is reaped.
    """

    alive: ClassVar[list[FakeReader]] = []
    next_pid: ClassVar[int] = 100

    def __init__(self, pid: int) -> None:
        self.pid, self.verdict = pid, ""
        self.requests: deque[tuple[MessageKind, int, MessageKind]] = deque()
        self.replies: asyncio.Queue[tuple[MessageKind, int, str] | None] = asyncio.Queue()
        self.may_be_reaped = asyncio.Event()
        self.handles: dict[int, set[bytes]] = {}  # open handles of each client
        self.offers: dict[int, set[bytes]] = {}
        self.writing: dict[int, list[int]] = {}  # offsets of each batch

    @classmethod
    async def start(cls, uuid: str, fd: int, pids: Any) -> FakeReader:
        await asyncio.sleep(0)
        while cls.next_pid in pids():
            cls.next_pid = 100 + (cls.next_pid - 99) % 8
        reader = cls(cls.next_pid)
        cls.alive.append(reader)
        return reader

    def ask(self, kind: MessageKind, number: int, body: bytes, answer: MessageKind, seconds: float) -> None:
        if self.is_ending:
            return
        if kind == MessageKind.OPEN:
            _, offer = messages.parse_open(body)
            handles = {allocation.ipc_handle for allocation in pb.TransferOffer.FromString(offer).allocations}
            self.offers[number] = handles
        if kind == MessageKind.COPY:
            parts = list(messages.parse_copies(body))
            assert all(part.client in self.handles for part in parts), "a copy for a client that is not open"
            self.writing[number] = [int(offset) for part in parts for offset in part.offsets]
        self.requests.append((kind, number, answer))

    def send(self, kind: MessageKind, number: int, body: bytes = b"") -> None:
        pass

    async def receive(self) -> tuple[MessageKind, int, str] | None:
        return await self.replies.get()

    @property
    def is_ending(self) -> bool:
        return bool(self.verdict)

    def kill(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict
        self.replies.put_nowait(None)

    async def reap(self) -> str:
        await self.may_be_reaped.wait()
        self.alive.remove(self)
        self.writing.clear()
        return self.verdict or "exited"

    def answer(self, reason: str) -> None:
        kind, number, answer = self.requests.popleft()
        if kind == MessageKind.OPEN and not reason:
            open_handles = set().union(*self.handles.values()) if self.handles else set()
            assert not open_handles & self.offers[number], "an old mapping would be used for the new memory"
            self.handles[number] = self.offers[number]
        if kind == MessageKind.COPY:
            del self.writing[number]
        if kind == MessageKind.CLOSE:
            self.handles.pop(number, None)
        self.replies.put_nowait((answer, number, reason if kind == MessageKind.OPEN else ""))


class GpuMachine(RuleBasedStateMachine):
    """Rules: clients attach, detach and start copies; readers answer, refuse and die."""

    def __init__(self) -> None:
        super().__init__()
        FakeReader.alive, FakeReader.next_pid = [], 100
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gpu, "ReaderProcess", FakeReader)
        self.loop = asyncio.new_event_loop()
        arena = SimpleNamespace(geometry=Geometry(4096, 1), num_rows=100, ready_rows=100, fileno=lambda: 0)
        self.gpu = GpuCopier("GPU-1", arena, CopyStats())
        self.copies_by_sidecar: dict[int, bool] = {}  # the last answer to each client
        self.present: set[int] = set()
        self.jobs: list[tuple[int, set[int], Any]] = []
        self.next_number = self.next_offset = 0

    def serve_all(self) -> None:
        """Let all readers answer until no request is left."""
        for _ in range(50):
            for reader in list(FakeReader.alive):
                if reader.is_ending:
                    reader.may_be_reaped.set()
                while reader.requests and not reader.is_ending:
                    reader.answer("")
            self.run()

    def teardown(self) -> None:
        self.serve_all()
        assert all(self.copies_by_sidecar[number] for number in self.gpu._members), "a client waits forever"
        for _ in range(20):  # several readers may start one after the other
            for reader in FakeReader.alive:
                reader.kill("the end")
                reader.may_be_reaped.set()
            for number in list(self.present):
                self.gpu.remove(number)
            self.run()
        assert not FakeReader.alive
        assert all(job.ended.done() for _, _, job in self.jobs), "a job did not end"
        assert self.gpu.num_slots_under_way == 0
        self.loop.close()
        self.patch.undo()

    def run(self) -> None:
        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    @rule(pid=PIDS, handle=st.integers(0, 4))
    def attach(self, pid, handle):
        self.next_number += 1
        number = self.next_number
        allocation = pb.DeviceAllocation(ipc_handle=bytes([handle]) * 64, num_bytes=1 << 20)
        pages = pb.GroupPages(num_blocks=9, blocks_per_row=1, layers=[pb.LayerPages(page_bytes=4096)])
        offer = pb.TransferOffer(allocations=[allocation], groups=[pages])

        def on_change(is_ipc: bool, reason: str) -> None:
            self.copies_by_sidecar[number] = is_ipc

        async def add() -> None:
            self.gpu.add(Member(number, pid, 0, offer, on_change))

        self.present.add(number)
        self.loop.run_until_complete(add())
        self.run()

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def detach(self, data):
        number = data.draw(st.sampled_from(sorted(self.present)))
        self.gpu.remove(number)
        self.copies_by_sidecar[number] = False
        self.present.discard(number)
        self.run()

    @precondition(lambda self: any(self.copies_by_sidecar.values()))
    @rule(data=st.data(), num_slots=st.integers(1, 4), num_jobs=st.integers(1, 4))
    def start_copies(self, data, num_slots, num_jobs):
        number = data.draw(
            st.sampled_from([number for number, is_ipc in self.copies_by_sidecar.items() if is_ipc])
        )
        for _ in range(num_jobs):
            self.begin(number, num_slots)
        self.run()

    def begin(self, number, num_slots):
        offsets = [self.next_offset + index for index in range(num_slots)]
        self.next_offset += num_slots

        async def begin() -> Any:
            blocks = np.zeros(1, np.uint32)
            return self.gpu.begin(number, [PlacedCopy(0, offset, blocks) for offset in offsets])

        self.jobs.append((number, set(offsets), self.loop.run_until_complete(begin())))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def drop_job(self, data):
        number, _, job = data.draw(st.sampled_from(self.jobs))
        self.gpu.drop(number, job)
        self.run()

    @precondition(lambda self: any(reader.requests for reader in FakeReader.alive))
    @rule(refused=st.lists(st.sampled_from(["", "", "", "no"]), min_size=1, max_size=5))
    def answer(self, refused):
        for reason in refused:
            for reader in FakeReader.alive:
                if reader.requests and not reader.is_ending:
                    reader.answer(reason)
            self.run()

    @precondition(lambda self: bool(FakeReader.alive))
    @rule()
    def die(self):
        for reader in list(FakeReader.alive):
            reader.kill("died")
        self.run()

    @precondition(lambda self: bool(FakeReader.alive))
    @rule()
    def reap_readers(self):
        """Reap exited readers. A killed process may hang in the kernel before this step."""
        for reader in list(FakeReader.alive):
            if reader.is_ending:
                reader.may_be_reaped.set()
        self.run()

    @invariant()
    def no_job_ends_while_its_slots_may_be_written(self):
        writing = {offset for reader in FakeReader.alive for w in reader.writing.values() for offset in w}
        for _, offsets, job in self.jobs:
            if job.ended.done():
                assert not offsets & writing
                assert bool(job.refusal) != all(job.copied)

    @invariant()
    def at_most_a_single_reader_runs_and_its_id_is_no_clients_id(self):
        assert len(FakeReader.alive) <= 1
        for reader in FakeReader.alive:
            if not reader.is_ending and not self.gpu._is_retiring:
                assert reader.pid not in self.gpu._pids()

    @invariant()
    def clients_of_the_sidecar_have_open_handles(self):
        reader = FakeReader.alive[0] if FakeReader.alive else None
        for number, is_ipc in self.copies_by_sidecar.items():
            if is_ipc and reader is not None and not reader.is_ending:
                assert number in reader.handles


def test_client_attached_while_a_reader_stops_gets_the_next_reader():
    model = GpuMachine()
    model.attach(pid=200, handle=1)
    model.serve_all()
    assert model.copies_by_sidecar == {1: True}
    model.gpu.remove(1)
    model.present.clear()
    (reader,) = FakeReader.alive
    reader.answer("")
    model.run()
    assert reader.is_ending, "no client needs the reader"
    model.attach(pid=201, handle=1)
    assert not model.copies_by_sidecar[2]
    model.serve_all()
    assert model.copies_by_sidecar[2]
    model.teardown()


def test_client_present_at_repeated_reader_exits_copies_by_itself():
    model = GpuMachine()
    model.attach(pid=200, handle=1)
    for _ in range(gpu._MAX_MOVES + 1):
        model.serve_all()
        assert model.copies_by_sidecar[1]
        model.die()
    model.serve_all()
    assert not model.copies_by_sidecar[1]
    model.teardown()


TestGpuModel = GpuMachine.TestCase
TestGpuModel.settings = settings(max_examples=examples(60), stateful_step_count=40)
