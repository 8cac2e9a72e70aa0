"""Messages between the sidecar and the reader of a GPU, over a pair of sockets. Pure.

::

    sidecar                              reader
    START(format of the arena, GPU) ->
                                    <-   STARTED
    GROWN(rows)                     ->
    OPEN(client, offer)             ->
                                    <-   OPENED(client, problem or empty)
    COPY(batch, copies)             ->
                                    <-   COPIED(batch)
                                    <-   PINNED(bytes, failures), after each registration
    CLOSE(client)                   ->
                                    <-   CLOSED(client)
                                    <-   FAILED(reason); then the reader ends

Answers to COPY and CLOSE arrive in the order of the requests. CLOSED therefore proves that no copy for the
client is under way. Lengths are bounded, numbers are little-endian, and nothing is pickled.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_client.cuda.pin_status import PinStatus

HEAD = struct.Struct("<IIQ")
"""Kind, bytes of the body, and a number: of a client, of a batch, or of ready rows."""

MAX_BODY_BYTES = 8 << 20

_FORMAT = struct.Struct("<QQQ")
_COLUMN = struct.Struct("<Q")
_COPIES = struct.Struct("<QIII4x")
_MAX_REASON_BYTES = 2048


class MessageError(Exception):
    """A message does not follow this module's format."""


class MessageKind(enum.IntEnum):
    """Kinds of messages, as numbered on the socket."""

    START = 1
    STARTED = 2
    GROWN = 3
    OPEN = 4
    OPENED = 5
    COPY = 6
    COPIED = 7
    CLOSE = 8
    CLOSED = 9
    FAILED = 10
    PINNED = 11


class Format(NamedTuple):
    """Format of the arena."""

    slot_bytes: int
    num_rows: int
    ready_rows: int


class Copies(NamedTuple):
    """Slots to fill, of one client and KV group."""

    client: int
    group: int
    offsets: NDArray[np.uint64]
    """Places of the slots in the arena's file, in bytes."""
    blocks: NDArray[np.uint32]
    """Numbers of the blocks to copy, ``[num_slots, blocks_per_row]``."""


def pack(kind: MessageKind, number: int = 0, body: bytes = b"") -> bytes:
    """Return a whole message."""
    return HEAD.pack(kind, len(body), number) + body


def parse_head(head: bytes) -> tuple[MessageKind, int, int]:
    """Return kind, bytes of the body and number. Raises MessageError."""
    kind, num_bytes, number = HEAD.unpack(head)
    if kind not in list(MessageKind) or num_bytes > MAX_BODY_BYTES:
        raise MessageError(f"message {kind} of {num_bytes} bytes")
    return MessageKind(kind), num_bytes, number


def pack_reason(reason: str) -> bytes:
    """Return the body of OPENED and FAILED."""
    return reason.encode(errors="replace")[:_MAX_REASON_BYTES]


def pack_pinned(status: PinStatus) -> bytes:
    """Return PINNED, the whole message."""
    return pack(
        MessageKind.PINNED, status.pinned_bytes, pack_reason(f"{status.num_failures} {status.problem}")
    )


def parse_pinned(pinned_bytes: int, text: str) -> PinStatus:
    """Return the status from the number and the body of PINNED. Raises ValueError."""
    num_failures, _, problem = text.partition(" ")
    return PinStatus(pinned_bytes, int(num_failures), problem)


def pack_start(gpu_uuid: str, format_: Format) -> bytes:
    """Return the body of START."""
    return _FORMAT.pack(*format_) + gpu_uuid.encode()


def parse_start(body: bytes) -> tuple[str, Format]:
    """Undo ``pack_start``."""
    return body[_FORMAT.size :].decode(), Format(*_FORMAT.unpack_from(body))


def pack_open(column_offset: int, offer: bytes) -> bytes:
    """Return the body of OPEN: the offset of the client's column in the arena's file, and its offer."""
    return _COLUMN.pack(column_offset) + offer


def parse_open(body: bytes) -> tuple[int, bytes]:
    """Undo ``pack_open``."""
    return _COLUMN.unpack_from(body)[0], body[_COLUMN.size :]


def pack_copies(copies: Iterable[Copies]) -> bytes:
    """Return the body of COPY."""
    parts = []
    for client, group, offsets, blocks in copies:
        parts += [_COPIES.pack(client, group, *blocks.shape), offsets.tobytes(), blocks.tobytes()]
    return b"".join(parts)


def parse_copies(body: bytes) -> Iterator[Copies]:
    """Undo ``pack_copies``. Raises MessageError."""
    start = 0
    try:
        while start < len(body):
            client, group, num_slots, num_blocks = _COPIES.unpack_from(body, start)
            start += _COPIES.size
            offsets = np.frombuffer(body, "<u8", num_slots, start)
            start += offsets.nbytes
            blocks = np.frombuffer(body, "<u4", num_slots * num_blocks, start).reshape(num_slots, num_blocks)
            start += blocks.nbytes
            yield Copies(client, group, offsets, blocks)
    except (ValueError, struct.error) as error:
        raise MessageError(f"a COPY of {len(body)} bytes: {error}") from error
