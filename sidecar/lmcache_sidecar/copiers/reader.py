"""The reader of one GPU: a program that the sidecar starts, ``python -m lmcache_sidecar.copiers.reader``.

The reader opens the engines' KV by CUDA IPC and copies blocks into the arena. It never writes to a GPU. It is
a separate process for three reasons:

- A CUDA context costs memory on its GPU.
- One bad copy can break a context for good.
- CUDA refuses handles of a process with the same process id, even if that process is in another PID
  namespace.

One thread receives messages and queues copies on the GPU. The other thread waits for their ends in order and
answers. A failure while copies may be under way ends the process, because only that proves that they ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import Device, GpuEvent, GpuStream
from lmcache_client.cuda.errors import CudaError, CudaUnavailableError
from lmcache_client.cuda.ipc import Mapping, Mappings
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.cuda.pins import Pins
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import Format, MessageError, MessageKind
from lmcache_sidecar.copiers.pages import Column, Opened, Pages
from lmcache_store.common.numa import on_node

_PR_SET_PDEATHSIG = 1


class Link:
    """Messages from and to the sidecar. Sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # keeps messages of two threads apart

    def send(self, kind: MessageKind, number: int = 0, reason: str = "") -> None:
        """Send a message without a body, except for a reason. Raises OSError."""
        self.send_packed(messages.pack(kind, number, messages.pack_reason(reason)))

    def send_packed(self, message: bytes) -> None:
        """Send a whole message. Raises OSError."""
        with self._lock:
            self._connection.sendall(message)

    def receive(self) -> tuple[MessageKind, int, bytes] | None:
        """Wait for the next message; None: the sidecar has ended. Raises MessageError."""
        head = self._read(messages.HEAD.size)
        if head is None:
            return None
        kind, num_bytes, number = messages.parse_head(head)
        body = self._read(num_bytes)
        return None if body is None else (kind, number, body)

    def _read(self, num_bytes: int) -> bytes | None:
        data = self._connection.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        return data if len(data) == num_bytes else None


class OpenedMemory(NamedTuple):
    """The opened memory of one engine process."""

    mappings: list[Mapping]
    groups: dict[int, Pages]


class Reader:
    """Copies blocks of one GPU into the arena, as the sidecar requests."""

    def __init__(self, link: Link, arena: mmap.mmap, gpu_uuid: str, arena_format: Format) -> None:
        """Raises CudaUnavailableError, CudaError."""
        self._link = link
        self._arena = np.frombuffer(arena, np.uint8)
        self._format = arena_format
        self._context = Device.find(gpu_uuid).primary_context()
        self._stream = GpuStream(self._context)
        self._mappings = Mappings(self._context)
        self._clients: dict[int, OpenedMemory] = {}
        self._pins: dict[int, Pins] = {}  # by offset of the column
        self._ends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._handlers: dict[MessageKind, Callable[[int, bytes], None]] = {
            MessageKind.GROWN: self._grow, MessageKind.OPEN: self._open,
            MessageKind.COPY: self._copy, MessageKind.CLOSE: self._close,
        }  # fmt: skip

    def run(self) -> None:
        """Serve until the sidecar ends. Raises CudaError, MessageError, ValueError: each ends the process."""
        threading.Thread(target=self._answer, daemon=True).start()
        self._link.send(MessageKind.STARTED)
        while (message := self._link.receive()) is not None:
            kind, number, body = message
            if kind not in self._handlers:
                raise MessageError(f"a reader does not handle {kind.name} messages")
            self._handlers[kind](number, body)

    def _answer(self) -> None:
        """Run queued work in order: what follows a copy must wait for its end.

        A handle must not be opened while an earlier mapping of the same handle is still to be closed.
        """
        with _ending(self._link):
            while True:
                self._ends.get()()

    def _grow(self, ready_rows: int, _: bytes) -> None:
        self._format = self._format._replace(ready_rows=ready_rows)
        for pins in list(self._pins.values()):
            pins.set_ready(ready_rows * self._format.slot_bytes)

    def _open(self, number: int, body: bytes) -> None:
        offset, offered = messages.parse_open(body)
        column, offer = self._column(offset), pb.TransferOffer.FromString(offered)

        def end() -> None:
            reason = ""
            try:
                self._clients[number] = self._open_memory(offer, column)
                self._pin(column)
            except (CudaError, ValueError) as error:
                if isinstance(error, CudaError) and error.is_sticky:
                    raise
                reason = f"the engine's GPU memory can't be opened: {error}"
            self._link.send(MessageKind.OPENED, number, reason)

        self._ends.put(end)

    def _column(self, offset: int) -> Column:
        num_bytes = self._format.num_rows * self._format.slot_bytes
        if offset + num_bytes > self._arena.nbytes:
            raise MessageError(f"a column at byte {offset} exceeds the arena of {self._arena.nbytes}")
        return Column(offset, num_bytes, self._format.slot_bytes, self._arena.ctypes.data + offset)

    def _open_memory(self, offer: pb.TransferOffer, column: Column) -> OpenedMemory:
        mappings: list[Mapping] = []
        try:
            for allocation in offer.allocations:
                mappings.append(self._mappings.open(allocation.ipc_handle))
            opened = [Opened(mapping.base, mapping.num_bytes) for mapping in mappings]
            groups = {pages.group: Pages(pages, opened, column) for pages in offer.groups}
            return OpenedMemory(mappings, groups)
        except BaseException:
            for mapping in mappings:
                with contextlib.suppress(CudaError):  # only the first error is reported
                    mapping.close()
            raise

    def _pin(self, column: Column) -> None:
        if column.offset not in self._pins:
            pins = self._pins[column.offset] = Pins(
                self._context, column.address, column.num_bytes, on_change=self._report_pins,
                reports_progress=True,
            )  # fmt: skip
            pins.set_ready(self._format.ready_rows * self._format.slot_bytes)

    def _report_pins(self) -> None:
        status = PinStatus.total(pins.status for pins in list(self._pins.values()))
        with contextlib.suppress(OSError):  # the sidecar has ended: the main thread ends this process
            self._link.send_packed(messages.pack_pinned(status))

    def _copy(self, batch: int, body: bytes) -> None:
        parts = [
            self._clients[copies.client].groups[copies.group].pieces(copies.offsets, copies.blocks)
            for copies in messages.parse_copies(body)
        ]
        to, from_, sizes = (np.concatenate(words) for words in zip(*parts, strict=True))
        columns = list(self._pins.values())
        edges = np.sort(np.concatenate([pins.edges for pins in columns]))
        event = GpuEvent(self._context)
        pieces = CopyBatch(to, from_, sizes, edges)
        is_pinned = bool(np.any([pins.covers(pieces.to) for pins in columns], axis=0).all())
        pieces.submit(self._stream, is_source_stable=True, is_pinned=is_pinned)
        event.record(self._stream)

        def end() -> None:
            event.synchronize()
            event.close()
            self._link.send(MessageKind.COPIED, batch)

        self._ends.put(end)

    def _close(self, number: int, _: bytes) -> None:
        def end() -> None:
            client = self._clients.pop(number, None)
            for mapping in client.mappings if client else ():
                mapping.close()
            self._link.send(MessageKind.CLOSED, number)

        self._ends.put(end)


@contextlib.contextmanager
def _ending(link: Link) -> Iterator[None]:
    """End the process after any error, and report the reason to the sidecar first."""
    try:
        yield
    except BaseException as error:
        reason = str(error)
        if not isinstance(error, CudaError | CudaUnavailableError):
            reason = f"the reader of its GPU has a bug, see the sidecar's log: {error!r}"
            traceback.print_exc()
        with contextlib.suppress(OSError):
            link.send(MessageKind.FAILED, reason=reason)
        sys.stderr.flush()
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Run a reader. ``arguments``: the descriptors of the socket and the arena.

    The arena's lock belongs to its descriptor: the arena stays locked until this process ends, too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link, arena_fd = Link(socket.socket(fileno=int(arguments[0]))), int(arguments[1])
    with _ending(link):
        first = link.receive()  # the sidecar may reject this process id: start CUDA only after START
        if first is not None and first[0] == MessageKind.START:
            gpu_uuid, arena_format = messages.parse_start(first[2])
            arena = mmap.mmap(arena_fd, os.fstat(arena_fd).st_size)
            with on_node(Device.find(gpu_uuid).numa_node):
                Reader(link, arena, gpu_uuid, arena_format).run()
    os._exit(0)  # the kernel frees everything, faster and more reliably than this code


if __name__ == "__main__":
    main(sys.argv[1:])
