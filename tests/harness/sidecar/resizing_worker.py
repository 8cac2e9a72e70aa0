"""A client of a sidecar whose memory tier is resized: the real end of its stream, and a modelled device."""

import asyncio
import contextlib
import hashlib
from typing import Any

import numpy as np

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.attachment import Attachment, hello_message
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.open_copies import OpenCopies
from lmcache_sidecar.clients.registry import Client
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.memory.mapping import MappedColumn
from tests.harness.sidecar.world import FakeLock

SLOT_BYTES, CAPACITY = 4096, 40 * 4096
SIZES = [SLOT_BYTES * number for number in (10, 24, 40)]
KEYS = range(30)
HELLO = ClientHello(
    Role.WORKER, engine_uuid=b"e" * 16, namespace=b"n" * 32, chunk_tokens=16, groups=(KVGroup(0, 16, 4096),)
)


def payload(key: int) -> bytes:
    return bytes([key + 1]) * SLOT_BYTES


class Device:
    """Pins rows of one mapping. It still sees the old content of rows that are punched while pinned."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self.pinned: set[int] = set()
        self.old_pages: dict[int, np.ndarray] = {}

    def set_ready(self, num_rows: int) -> None:
        self.pinned = set(range(num_rows))
        self.old_pages = {row: page for row, page in self.old_pages.items() if row in self.pinned}

    def page(self, row: int) -> np.ndarray:
        return self.old_pages.get(row, self.slots[row])

    def before_punch(self, rows: range) -> None:
        for row in self.pinned.intersection(rows):
            self.old_pages.setdefault(row, self.slots[row].copy())


class SessionDouble:
    """Replaces the session for which the client counts copies."""

    is_over = False

    def check_present(self) -> None:
        pass


class Worker:
    """A client with the real end of its stream, and a modelled device.

    ``model`` has the sidecar's sessions, arena and clock.
    """

    def __init__(self, model: Any, number: int) -> None:
        self.model = model
        self.uuid = bytes([number]) * 16
        self.copies = OpenCopies(lambda: None)
        self.device: Device | None = None
        self.older_devices: list[Device] = []
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
        self.sent_extents = attached.ready_rows, 0
        self.model.settle()

    def lose(self) -> None:
        """Lose the stream. Copies continue."""
        if self.client is not None:
            self.session.is_over = True
            self.model.sessions.clients.detach(self.client)
            while self.reserved:
                self.reserved.pop()[0].close()

    def die(self) -> None:
        """Die, so that a new process can replace this worker later."""
        self.lose()
        self.loads, self.older_devices, self.device, self.copies = [], [], None, OpenCopies(lambda: None)
        FakeLock.held.discard(self.uuid.hex())
        for _ in range(2):
            self.model.sessions.clients.monitor.step()
            self.model.now += 3.0

    def prepare(self, slots: np.ndarray, ready_rows: int, is_alone: bool) -> None:
        if self.device is None or self.device.slots is not slots:
            if self.device is not None:
                self.older_devices.append(self.device)
            self.device = Device(slots)
        self.device.set_ready(ready_rows)
        if is_alone:
            self.older_devices = []

    @property
    def devices(self) -> list[Device]:
        return [*self.older_devices, *([self.device] if self.device else [])]

    def work(self) -> None:
        """Do the next step of the stream's thread."""
        sessions, stream = self.model.sessions, self.stream
        extents = sessions.extents(self.client)
        # The condition under which the server sends extents.
        if extents != self.sent_extents and (extents[1] or extents[0] > self.sent_extents[0]):
            self.sent_extents = extents
            stream._extend(pb.Extents(ready_rows=extents[0], round=extents[1]))
        if stream._must_drain():
            stream._drained = True
            sessions.clients.note_drained(self.client, pb.Drained(epoch=self.client.epoch))
        elif stream._must_release_extents():
            self.client.released_round = stream._release_extents()
        elif stream._must_populate():
            stream._populate()

    def begin_copy(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(self.copies.block(self.session))
        return stack


def name(key: int) -> bytes:
    return hashlib.sha512(bytes([key])).digest()  # the hash determines places in the index
