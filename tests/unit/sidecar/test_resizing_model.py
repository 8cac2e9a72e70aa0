"""Sizes asked for at random, while clients store, load, pin, freeze, attach again and die, and the sidecar
restarts: no client ever takes wrong bytes for a row's, and memory is given back whenever it can be.

Arena, memory tier, sessions, resizer and the client's end of the stream are real. What a device does is
modelled: it goes on with the pages that it has pinned when holes are punched.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import shutil
import tempfile
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_sidecar.clients.registry import Client, Clients
from lmcache_sidecar.copiers.copier import Mode, SidecarCopier
from lmcache_sidecar.followed import SizeFile
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.sessions import Sessions

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.attachment import Attachment, hello_message
from lmcache.rpc.client import ClientHello, KVGroup, Role
from lmcache.rpc.session import Copies
from lmcache.tiers.memory import arena as arenas
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.memory.mapping import MappedColumn, MappedIndex
from tests.harness.pinning import Device
from tests.harness.world import FakeLock, FakeStore

SLOT_BYTES, CAPACITY = 4096, 40 * 4096
SIZES = [SLOT_BYTES * number for number in (10, 24, 40)]
KEYS = range(30)
HELLO = ClientHello(
    Role.WORKER, engine_uuid=b"e" * 16, namespace=b"n" * 32, chunk_tokens=16, groups=(KVGroup(0, 16, 4096),)
)


def payload(key: int) -> bytes:
    return bytes([key + 1]) * SLOT_BYTES


class SessionDouble:
    """What the client counts copies of."""

    is_over = False

    def check_present(self) -> None:
        pass


class Worker:
    """One client: the real end of its stream, and a device."""

    def __init__(self, model: ResizingModel, number: int) -> None:
        self.model = model
        self.uuid = bytes([number]) * 16
        self.copies = Copies(lambda: None)
        self.device: Device | None = None
        self.older: list[Device] = []
        self.client: Client | None = None
        self.loads: list[tuple[contextlib.ExitStack, Device, MappedColumn, Slot, int]] = []
        self.reserved: list[tuple[contextlib.ExitStack, Device, Slot, int]] = []

    @property
    def is_attached(self) -> bool:
        return self.client is not None and self.client.is_attached

    def attach(self) -> None:
        self.lose()
        sessions, arena = self.model.sessions, self.model.arena
        FakeLock.held.add(self.uuid.hex())
        self.client = asyncio.run(sessions.attach(hello_message(HELLO, self.uuid)))
        attached = sessions.attached_message(self.client)
        self.session = SessionDouble()
        self.stream = Attachment("", self.client.peer.hello, self.copies, set(), self.prepare)
        self.column = MappedColumn(
            arena.path, attached.table_offset, attached.column_offset, SLOT_BYTES, attached.num_rows
        )
        self.stream._column, self.stream._epoch = self.column, attached.epoch
        self.stream._extend(pb.Extents(ready_rows=attached.ready_rows))
        self.told = attached.ready_rows, 0
        self.model.settle()

    def lose(self) -> None:
        """Its stream broke; copies go on."""
        if self.client is not None:
            self.session.is_over = True
            self.model.sessions.clients.detach(self.client)
            while self.reserved:
                self.reserved.pop()[0].close()

    def die(self) -> None:
        """And another process takes its place, some time."""
        self.lose()
        self.loads, self.older, self.device, self.copies = [], [], None, Copies(lambda: None)
        FakeLock.held.discard(self.uuid.hex())
        for _ in range(2):
            self.model.sessions.clients.monitor.step()
            self.model.now += 3.0

    def prepare(self, slots: np.ndarray, ready_rows: int, is_alone: bool) -> None:
        if self.device is None or self.device.slots is not slots:
            if self.device is not None:
                self.older.append(self.device)
            self.device = Device(slots)
        self.device.set_ready(ready_rows)
        if is_alone:
            self.older = []

    @property
    def devices(self) -> list[Device]:
        return [*self.older, *([self.device] if self.device else [])]

    def work(self) -> None:
        """What the thread of its stream does next."""
        sessions, stream = self.model.sessions, self.stream
        extents = sessions.extents(self.client)
        if extents != self.told and (extents[1] or extents[0] > self.told[0]):  # as the server says it
            self.told = extents
            stream._extend(pb.Extents(ready_rows=extents[0], round=extents[1]))
        if stream._must_drain():
            stream._drained = True
            sessions.clients.drained(self.client, pb.Drained(epoch=self.client.epoch))
        elif stream._must_let_go():
            self.client.let_go = stream._let_go()
        elif stream._must_populate():
            stream._populate()

    def begin(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(self.copies.block(self.session))
        return stack


class ResizingModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="resizing-", dir="/dev/shm"))
        self.now = 100.0
        self.changed = threading.Condition()
        self.size = SizeFile("", CAPACITY, CAPACITY)
        self.workers = [Worker(self, number) for number in (1, 2)]
        self.punch_hole = arenas.punch_hole
        arenas.punch_hole = self.punch
        FakeLock.held.clear()
        self.faults: list[str] = []
        self.asked_bytes = CAPACITY
        self.open()
        for worker in self.workers:
            worker.attach()
        self.step()
        for worker in self.workers:
            for _ in range(4):
                worker.work()

    def open(self) -> None:
        self.arena = ArenaFile(self.folder / "arena", CAPACITY, target_bytes=self.size.num_bytes)
        clients = Clients(self.folder, FakeLock, lambda: self.now)
        copier = SidecarCopier(Mode.AUTO, self.arena)
        make_store = lambda: FakeStore(self.arena, lambda: self.now)  # noqa: E731
        self.sessions = Sessions(self.arena, str(self.arena.path), clients, copier, make_store)
        for worker in self.workers:
            if worker.uuid.hex() in FakeLock.held:
                clients.previous.add(worker.uuid)
                clients.monitor.watch(worker.uuid, FakeLock(self.folder / worker.uuid.hex()))
        asyncio.run(self.sessions.start())
        self.resizer = Resizer(self.sessions, copier, self.size, lambda: None)
        self.arena.start(self.note_change)
        self.settle()

    def note_change(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Called by the arena's thread: nothing may be in use, or pinned, that is given back."""
        if self.arena.geometry is not None:
            first = (offset - self.arena.column_offset(0)) // SLOT_BYTES
            rows = range(first, first + num_bytes // SLOT_BYTES)
            for worker in self.workers:
                for device in worker.devices:
                    if device.pinned.intersection(rows):
                        self.faults.append(f"{rows} are pinned")
                    device.before_punch(rows)
                if any(slot.row in rows for _, _, _, slot, _ in worker.loads):
                    self.faults.append(f"a copy from {rows} is under way")
            if self.sessions.store and self.memory._rows.allocator.used_frames(first):
                self.faults.append(f"rows in {rows} are in use")
        self.punch_hole(fd, offset, num_bytes)

    def teardown(self) -> None:
        try:
            self.let_everybody_go_on()
        finally:
            arenas.punch_hole = self.punch_hole
            self.arena.close()
            shutil.rmtree(self.folder)

    def let_everybody_go_on(self) -> None:
        """Whatever happened: the size that was asked for comes when nobody uses anything."""
        for worker in self.workers:
            while worker.loads:
                self.end_load(worker)
            for stack, _, slot, _ in worker.reserved:
                self.memory.abort([slot], 0, worker.uuid)
                stack.close()
            worker.reserved = []
            if not worker.is_attached:
                worker.attach()
        for request in KEYS:
            self.memory.release((b"e" * 16, str(request)))
        for _ in range(20):
            self.step()
            for worker in self.workers:
                worker.work()
        assert self.resizer.problem == ""
        assert self.arena.size_bytes == self.size.num_bytes
        assert self.arena.path.stat().st_blocks * 512 <= self.size.num_bytes
        assert self.memory.usable_slots == self.arena.ready_rows == self.arena.target_rows

    @property
    def memory(self):
        return self.sessions.store.memory

    def pick(self, data: st.DataObject, *, is_attached: bool = True) -> Worker | None:
        workers = [worker for worker in self.workers if worker.is_attached or not is_attached]
        return data.draw(st.sampled_from(workers)) if workers else None

    @rule(num_bytes=st.sampled_from(SIZES))
    def ask(self, num_bytes):
        self.size.num_bytes = num_bytes
        self.step()

    @rule()
    def everybody_goes_on(self):
        for worker in self.workers:
            if worker.is_attached:
                worker.work()
        self.step()

    @rule()
    def step(self):
        while self.resizer.step():
            pass
        self.asked_bytes = self.size.num_bytes
        self.settle()

    def settle(self) -> None:
        """Wait until the arena's thread has nothing to do."""
        arena = self.arena
        with self.changed:
            assert self.changed.wait_for(
                lambda: arena._grown == arena.target_rows and arena._filled <= max(arena._grown, arena._kept),
                60,
            )

    @rule(data=st.data(), is_all=st.booleans())
    def work(self, data, is_all):
        for worker in self.workers if is_all else [self.pick(data)]:
            if worker is not None and worker.is_attached:
                worker.work()
                worker.work()

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def reserve(self, data, key):
        if (worker := self.pick(data)) is None or worker.device is None:
            return
        slot = self.memory.reserve(name(key), 0, worker.uuid, length=SLOT_BYTES).slot
        if slot is not None:
            assert slot.row < self.arena.ready_rows, "its memory is not there"
            assert slot.row < self.arena.rows_within(self.asked_bytes), "it is to be given back"
            worker.device.page(slot.row)[:] = 0
            worker.reserved.append((worker.begin(), worker.device, slot, key))

    @rule(data=st.data(), is_good=st.booleans())
    def end_store(self, data, is_good):
        if (worker := self.pick(data)) is None or not worker.reserved:
            return
        stack, device, slot, key = worker.reserved.pop()
        if is_good:
            device.page(slot.row)[:] = np.frombuffer(payload(key), np.uint8)
            self.memory.commit([slot], 0, worker.uuid)
            self.arena.table.record_checksum(slot.row, 0, b"c" * 16)
        else:
            self.memory.abort([slot], 0, worker.uuid)
        stack.close()

    @rule(data=st.data())
    def fill(self, data):
        worker = self.pick(data)
        for key in KEYS if worker and worker.device else ():
            slot = self.memory.reserve(name(key), 0, worker.uuid, length=SLOT_BYTES).slot
            if slot is not None:
                worker.device.page(slot.row)[:] = np.frombuffer(payload(key), np.uint8)
                self.memory.commit([slot], 0, worker.uuid)
                self.arena.table.record_checksum(slot.row, 0, b"c" * 16)

    def last_row(self) -> tuple[Slot, int] | None:
        """Of those that are visible, with its key."""
        found = [(row, key) for key in KEYS if (row := self.memory._rows.find(name(key))) is not None]
        return (self.memory._rows.slot(max(found)[0]), max(found)[1]) if found else None

    @rule()
    def lease(self):
        if last := self.last_row():
            self.memory._leases.extend((b"e" * 16, str(last[1])), [last[0].row])

    @rule()
    def release(self):
        for key in KEYS:
            self.memory.release((b"e" * 16, str(key)))

    @rule(data=st.data())
    def begin_load(self, data):
        if (worker := self.pick(data)) and worker.device and (last := self.last_row()):
            assert worker.column.holds(last[0])
            worker.loads.append((worker.begin(), worker.device, worker.column, *last))

    @rule(data=st.data())
    def end_one_load(self, data):
        if (worker := self.pick(data, is_attached=False)) and worker.loads:
            self.end_load(worker)

    def end_load(self, worker: Worker) -> None:
        stack, device, column, slot, key = worker.loads.pop(0)
        copied = device.page(slot.row).tobytes()
        if column.holds(slot):
            assert copied == payload(key)
        stack.close()

    @rule(data=st.data(), what=st.sampled_from(["lose", "attach", "attach", "die", "restart"]))
    def trouble(self, data, what):
        if what == "restart":
            self.restart()
        elif worker := self.pick(data, is_attached=False):
            {"lose": worker.lose, "attach": worker.attach, "die": worker.die}[what]()

    def restart(self) -> None:
        for worker in self.workers:
            worker.lose()
            worker.client = None
        fcntl.flock(self.arena.fileno(), fcntl.LOCK_UN)  # as the end of the process does
        self.arena.close()
        self.open()
        for key in KEYS:
            if slot := self.memory.unverified(name(key)):
                self.memory._rows.pin(slot.row)
                is_intact = bytes(self.arena.view(slot.row, 0)) == payload(key)
                self.memory.verified(slot, is_intact=is_intact)
                self.memory._rows.unpin(slot.row)

    @invariant()
    def nothing_in_use_was_given_back(self):
        assert not self.faults

    @invariant()
    def what_is_there_is_right_for_everybody(self):
        for key, worker in itertools.product(KEYS, self.workers):
            number, device = self.memory._rows.find(name(key)), worker.device
            loads = worker.is_attached and device is not None and device.slots is worker.column.slots
            if loads and number is not None:
                assert device.page(number).tobytes() == payload(key)

    @invariant()
    def what_is_found_is_shown_to_engines(self):
        arena = self.arena
        index = MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)
        for key in KEYS:
            if (number := self.memory._rows.find(name(key))) is not None:
                shown = index.find_each(np.frombuffer(name(key), "<u8").reshape(1, -1))
                assert bool(shown.is_there[0]), "it was hidden, and is not any more"
                assert shown.rows[0] == number

    @invariant()
    def no_more_memory_is_taken_than_is_said(self):
        said = self.arena.size_bytes
        assert self.arena.path.stat().st_blocks * 512 <= max(said, self.arena.target_bytes)


def name(key: int) -> bytes:
    return hashlib.sha512(bytes([key])).digest()  # places in the index follow from it


TestResizing = ResizingModel.TestCase
TestResizing.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
