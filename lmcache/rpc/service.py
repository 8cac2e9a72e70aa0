"""What both ends of the wire must agree on beside the messages: names, limits, versions, where files lie."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

import grpc
from google.protobuf.message import Message

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.memory.contracts import Slot

PROTOCOL_VERSION = 4
"""Changes when an old peer would misread a message; fields are otherwise only ever added."""

SERVICE = "lmcache.kvcache.v1.KVCache"

DEFAULT_SOCKET = "/run/lmcache/kvcache.sock"
"""Where the sidecar listens unless told otherwise; ``LMCACHE_SOCKET`` overrides it on both sides."""

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` is 108 bytes with its terminating zero."""

MAX_MESSAGE_BYTES = 4 << 20
"""Larger messages are refused by gRPC itself with RESOURCE_EXHAUSTED."""

MAX_KEYS_PER_CALL = 256
"""Handlers take time in proportion to their keys (a Reserve of so many about 4 ms) while all others wait: who
has more makes several calls."""

MAX_KEYS_PER_LOOKUP = 4096
"""Of all groups together: whether a window's rows are there depends on where the hit ends, so a Lookup is not
cut into several. They take about 1 ms; what is beyond is not looked up."""

MAX_REQUEST_ID_BYTES = 256

REASON_METADATA = "lmcache-reason"
"""Trailing metadata of a refused call, for the reasons that a client acts upon."""

REASON_ATTACH_AGAIN = "attach-again"
"""The epoch is over or the client is not attached: only a new Attach helps."""

REASON_ENGINE_COPIES = "engine-copies"
"""The sidecar can't read the client's GPU memory (any more): the engine's own copier takes over at once."""

REASON_PROTOCOL = "protocol"
"""The peers' protocol versions differ: only an upgrade helps, so there is no hurry to try again."""


_SLOT = struct.Struct("<QQ")
SLOT_BYTES = _SLOT.size
"""Of a slot in a message: row and generation."""

BLOCK_BYTES = 4
"""Of a block's number in a message."""


class Method(NamedTuple):
    """One unary call of the service."""

    name: str
    request: type[Message]
    reply: type[Message]

    @property
    def path(self) -> str:
        """What goes over the wire."""
        return f"/{SERVICE}/{self.name}"


LOOKUP = Method("Lookup", pb.LookupRequest, pb.LookupReply)
RESERVE = Method("Reserve", pb.ReserveRequest, pb.ReserveReply)
COMMIT = Method("Commit", pb.CommitRequest, pb.CommitReply)
ABORT = Method("Abort", pb.AbortRequest, pb.AbortReply)
COPY_BLOCKS = Method("CopyBlocks", pb.CopyBlocksRequest, pb.CopyBlocksReply)
RELEASE = Method("Release", pb.ReleaseRequest, pb.ReleaseReply)
UNARY_METHODS = (LOOKUP, RESERVE, COPY_BLOCKS, COMMIT, ABORT, RELEASE)
ATTACH_PATH = f"/{SERVICE}/Attach"


def pack_slots(slots: Iterable[Slot]) -> bytes:
    """Slots as they go over the wire. Raises ValueError for what is no slot."""
    try:
        return b"".join(itertools.starmap(_SLOT.pack, slots))
    except struct.error as error:
        raise ValueError(f"not a slot: {error}") from error


def unpack_slots(packed: bytes) -> list[Slot]:
    """The slots of a message; its length is a multiple of ``SLOT_BYTES``."""
    return list(map(Slot._make, _SLOT.iter_unpack(packed)))


def check_socket_path(path: str) -> None:
    """Raise ValueError when the system can't address a UNIX socket at ``path``."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path {path!r} has {num_bytes} bytes, the system takes at most {MAX_SOCKET_PATH_BYTES}:"
            " choose a shorter directory"
        )


def locks_directory(socket_path: str) -> Path:
    """Directory of the clients' lock files; the sidecar makes it."""
    return Path(socket_path).parent / "clients"


def lock_path(socket_path: str, client_uuid: bytes) -> Path:
    """The file on which a client holds a POSIX record lock for as long as it lives."""
    return locks_directory(socket_path) / f"{client_uuid.hex()}.lock"


def reason_of(error: grpc.RpcError) -> str:
    """What a refused call carries under REASON_METADATA; empty if nothing."""
    metadata = cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())
    return next((value for key, value in metadata if key == REASON_METADATA), "")
