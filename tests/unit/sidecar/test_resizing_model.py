"""Model-based test of random resizes while clients store, load, pin, freeze, reattach and die.

The sidecar restarts, too. No client loads wrong bytes, and the sidecar releases memory whenever it can.

Arena, memory tier, sessions, resizer and the client's end of the stream are real. The device is modelled: it
continues to use the pages that it has pinned when holes are punched.
"""

import asyncio
import fcntl
import itertools
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.copiers.copier import Mode, SidecarCopier
from lmcache_sidecar.files.watched_files import SizeFile
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.sessions import Sessions
from lmcache_store.tiers.memory import arena as arenas
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.memory.kernel_pages import punch_hole
from lmcache_store.tiers.memory.mapping import MappedIndex
from tests.harness.scope import examples
from tests.harness.sidecar.resizing_worker import CAPACITY, KEYS, SIZES, SLOT_BYTES, Worker, name, payload
from tests.harness.sidecar.world import FakeLock, FakeStore


class ResizingModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="resizing-", dir="/dev/shm"))
        self.now = 100.0
        self.changed = threading.Condition()
        self.size = SizeFile("", CAPACITY, CAPACITY)
        self.workers = [Worker(self, number) for number in (1, 2)]
        self.patch = mock.patch.object(arenas, "punch_hole", self.punch)
        self.patch.start()
        FakeLock.held.clear()
        self.faults: list[str] = []
        self.applied_bytes = CAPACITY
        self.open()
        for worker in self.workers:
            worker.attach()
        self.step()
        for worker in self.workers * 4:
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
        self.arena.start(self.notify_change)
        self.settle()

    def notify_change(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Check that released pages are neither in use nor pinned. The arena's thread calls this."""
        if self.arena.geometry is not None:
            first_row = (offset - self.arena.column_offset(0)) // SLOT_BYTES
            rows = range(first_row, first_row + num_bytes // SLOT_BYTES)
            for worker in self.workers:
                for device in worker.devices:
                    if device.pinned.intersection(rows):
                        self.faults.append(f"{rows} are pinned")
                    device.before_punch(rows)
                if any(slot.row in rows for _, _, _, slot, _ in worker.loads):
                    self.faults.append(f"a copy from {rows} is in progress")
            if self.sessions.store and self.memory._rows.allocator.used_frames(first_row):
                self.faults.append(f"rows in {rows} are in use")
        punch_hole(fd, offset, num_bytes)

    def teardown(self) -> None:
        try:
            self.finish_and_check()
        finally:
            self.patch.stop()
            self.arena.close()
            shutil.rmtree(self.folder)

    def finish_and_check(self) -> None:
        """End all uses, and check that the arena then reaches the requested size."""
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
        assert (self.resizer.problem, self.arena.size_bytes) == ("", self.size.num_bytes)
        assert self.arena.path.stat().st_blocks * 512 <= self.size.num_bytes
        assert self.memory.usable_slots == self.arena.ready_rows == self.arena.target_rows

    @property
    def memory(self):
        return self.sessions.store.memory

    def pick(self, data: st.DataObject, *, is_attached: bool = True) -> Worker | None:
        workers = [worker for worker in self.workers if worker.is_attached or not is_attached]
        return data.draw(st.sampled_from(workers)) if workers else None

    @rule(num_bytes=st.sampled_from(SIZES))
    def request_size(self, num_bytes):
        self.size.num_bytes = num_bytes
        self.step()

    @rule()
    def run_workers_and_step(self):
        for worker in self.workers:
            if worker.is_attached:
                worker.work()
        self.step()

    @rule()
    def step(self):
        while self.resizer.step():
            pass
        self.applied_bytes = self.size.num_bytes
        self.settle()

    def settle(self) -> None:
        """Wait until the arena's thread has nothing to do."""
        arena = self.arena
        with self.changed:
            assert self.changed.wait_for(
                lambda: (
                    arena._num_ready == arena.target_rows
                    and arena._num_filled <= max(arena._num_ready, arena._num_retained)
                ),
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
            assert slot.row < self.arena.ready_rows, "the slot has no memory"
            assert slot.row < self.arena.rows_within(self.applied_bytes), "the slot's memory will be released"
            worker.device.page(slot.row)[:] = 0
            worker.reserved.append((worker.begin_copy(), worker.device, slot, key))

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
        """The last visible row and its key."""
        visible = [(row, key) for key in KEYS if (row := self.memory._rows.find(name(key))) is not None]
        return (self.memory._rows.slot(max(visible)[0]), max(visible)[1]) if visible else None

    @rule()
    def lease(self):
        if last_row_and_key := self.last_row():
            self.memory._leases.extend((b"e" * 16, str(last_row_and_key[1])), [last_row_and_key[0].row])

    @rule()
    def release(self):
        for key in KEYS:
            self.memory.release((b"e" * 16, str(key)))

    @rule(data=st.data())
    def begin_load(self, data):
        if (worker := self.pick(data)) and worker.device and (last_row_and_key := self.last_row()):
            assert worker.column.holds(last_row_and_key[0])
            worker.loads.append((worker.begin_copy(), worker.device, worker.column, *last_row_and_key))

    @rule(data=st.data())
    def end_load_of_a_worker(self, data):
        if (worker := self.pick(data, is_attached=False)) and worker.loads:
            self.end_load(worker)

    def end_load(self, worker: Worker) -> None:
        stack, device, column, slot, key = worker.loads.pop(0)
        copied = device.page(slot.row).tobytes()
        if column.holds(slot):
            assert copied == payload(key)
        stack.close()

    @rule(data=st.data(), fault=st.sampled_from(["lose", "attach", "attach", "die", "restart"]))
    def inject_fault(self, data, fault):
        if fault == "restart":
            self.restart()
        elif worker := self.pick(data, is_attached=False):
            {"lose": worker.lose, "attach": worker.attach, "die": worker.die}[fault]()

    def restart(self) -> None:
        for worker in self.workers:
            worker.lose()
            worker.client = None
        fcntl.flock(self.arena.fileno(), fcntl.LOCK_UN)  # as at the end of the process
        self.arena.close()
        self.open()
        for key in KEYS:
            if slot := self.memory.unverified_slot(name(key)):
                self.memory._rows.pin(slot.row)
                self.memory.note_verified(slot, is_intact=bytes(self.arena.view(slot.row, 0)) == payload(key))
                self.memory._rows.unpin(slot.row)

    @invariant()
    def check_no_memory_in_use_was_released(self):
        assert not self.faults

    @invariant()
    def check_workers_read_right_bytes(self):
        for key, worker in itertools.product(KEYS, self.workers):
            number, device = self.memory._rows.find(name(key)), worker.device
            loads = worker.is_attached and device is not None and device.slots is worker.column.slots
            if loads and number is not None:
                assert device.page(number).tobytes() == payload(key)

    @invariant()
    def check_found_rows_are_in_the_index(self):
        arena = self.arena
        index = MappedIndex(arena.path, arena.table_offset(0), arena.num_rows, *arena.index_place)
        for key in KEYS:
            if (number := self.memory._rows.find(name(key))) is not None:
                matches = index.find_each(np.frombuffer(name(key), "<u8").reshape(1, -1))
                assert bool(matches.is_there[0]), "a found row is missing in the index"
                assert matches.rows[0] == number

    @invariant()
    def check_used_memory_is_within_the_size(self):
        reported_bytes = self.arena.size_bytes
        assert self.arena.path.stat().st_blocks * 512 <= max(reported_bytes, self.arena.target_bytes)


TestResizing = ResizingModel.TestCase
TestResizing.settings = settings(
    max_examples=examples(40), stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
