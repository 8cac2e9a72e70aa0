"""Agreements of client and sidecar apart from the messages: names, limits, versions and paths of files."""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

import grpc
from google.protobuf.message import Message

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_store.tiers.memory.contracts import Slot

PROTOCOL_VERSION = 5
"""Version of the protocol, which changes if an old peer would misread a message; new fields don't count."""

SERVICE = "lmcache.kvcache.v1.KVCache"

DEFAULT_SOCKET = "/run/lmcache/kvcache.sock"
"""Default path of the sidecar's socket. ``LMCACHE_SOCKET`` overrides it on both sides."""

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a UNIX socket: ``sun_path`` has 108 bytes, including its terminating zero."""

MAX_MESSAGE_BYTES = 1 << 20
"""Largest message. gRPC refuses larger ones with RESOURCE_EXHAUSTED. The largest Lookup has a quarter of it.

The sidecar needs about three times the size of each message that clients send at the same time."""

MAX_KEYS_PER_CALL = 256
"""Largest number of keys or slots in a call; clients split longer lists. A Reserve of this size takes about
4 ms, while all other clients wait."""

MAX_KEYS_PER_LOOKUP = 4096
"""Largest number of keys in a Lookup, of all groups together; the sidecar takes about 1 ms for them. A Lookup
is not split, because the rows that a window needs depend on the end of the hit. Later keys are ignored."""

NAME_BYTES, MAX_FIRST_BLOCKS = 8, 63
"""Bytes of a block's hash in Scheduled.first_blocks, and the largest number of blocks."""

MAX_REQUEST_ID_BYTES = 256

MAX_TEXT_BYTES = 512
"""Longest reason or name in a message. The sidecar refuses a message with a longer one."""

MAX_TIMES = 256
"""Largest number of requests whose times one Release reports."""

MARK_BYTES, MAX_MARKS = 8, 131_072
"""Bytes of a document's mark, and the largest number of marks that a sidecar shares between the engines of a
namespace. The oldest marks are dropped first."""

MAX_MARKS_PER_CALL = 32_768
"""Largest number of marks in one message, in each direction."""

REASON_METADATA = "lmcache-reason"
"""Trailing metadata of a refused call, with the reasons that a client acts on."""

REASON_ATTACH_AGAIN = "attach-again"
"""The epoch is over, or the client is not attached: the client must attach again."""

REASON_ENGINE_COPIES = "engine-copies"
"""The sidecar can't read the client's GPU memory: the engine must copy, from now on."""

REASON_PROTOCOL = "protocol"
"""The protocol versions differ: only an upgrade helps, so clients retry slowly."""

_SHARED_DIRECTORIES = "/tmp", "/var/tmp", "/dev/shm"

_SLOT = struct.Struct("<QQ")
SLOT_BYTES = _SLOT.size
"""Bytes of a slot in a message: row and generation."""

BLOCK_BYTES = 4
"""Bytes of a block's number in a message."""


class Method(NamedTuple):
    """One unary call of the service."""

    name: str
    request: type[Message]
    reply: type[Message]

    @property
    def path(self) -> str:
        """Path of the call in gRPC."""
        return f"/{SERVICE}/{self.name}"


LOOKUP = Method("Lookup", pb.LookupRequest, pb.LookupReply)
RESERVE = Method("Reserve", pb.ReserveRequest, pb.ReserveReply)
COMMIT = Method("Commit", pb.CommitRequest, pb.CommitReply)
ABORT = Method("Abort", pb.AbortRequest, pb.AbortReply)
COPY_BLOCKS = Method("CopyBlocks", pb.CopyBlocksRequest, pb.CopyBlocksReply)
RELEASE = Method("Release", pb.ReleaseRequest, pb.ReleaseReply)
SHARE_MARKS = Method("ShareMarks", pb.ShareMarksRequest, pb.ShareMarksReply)
APPLY_HINTS = Method("ApplyHints", pb.ApplyHintsRequest, pb.ApplyHintsReply)
READ_HINTS = Method("ReadHints", pb.ReadHintsRequest, pb.ApplyHintsReply)
UNARY_METHODS = (
    LOOKUP, RESERVE, COPY_BLOCKS, COMMIT, ABORT, RELEASE, SHARE_MARKS, APPLY_HINTS, READ_HINTS,
)  # fmt: skip
ATTACH_PATH = f"/{SERVICE}/Attach"


def pack_slots(slots: Iterable[Slot]) -> bytes:
    """Encode slots for a message. Raises ValueError if one is out of range."""
    try:
        return b"".join(itertools.starmap(_SLOT.pack, slots))
    except struct.error as error:
        raise ValueError(f"not a slot: {error}") from error


def unpack_slots(packed: bytes) -> list[Slot]:
    """Decode the slots of a message, whose length must be a multiple of ``SLOT_BYTES``."""
    return list(map(Slot._make, _SLOT.iter_unpack(packed)))


def shortened(text: str) -> str:
    """Return the beginning of a text that a message can contain."""
    return text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")


def check_socket_path(path: str) -> None:
    """Raise ValueError if the system can't address a UNIX socket at ``path``."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path {path!r} has {num_bytes} bytes, the system takes at most {MAX_SOCKET_PATH_BYTES}:"
            " choose a shorter directory"
        )


def directory_problem(directory: str) -> str:
    """Return why other users could replace the files in a directory, with the remedy; empty if they can't.

    A directory of root is the system's, or a volume of a pod, where any user may be able to write: engine and
    sidecar can be different users there, and containers of one pod trust each other. Raises OSError.
    """
    status, user = os.stat(directory), os.geteuid()
    remedy = "make a directory that only you can use: install -d -m 700 DIRECTORY"
    if os.path.realpath(directory) in _SHARED_DIRECTORIES:
        return f"all users share {directory}: {remedy}"
    if status.st_uid not in (0, user):
        return f"{directory} belongs to user {status.st_uid}, and this process is user {user}: {remedy}"
    if status.st_uid and status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        return f"all users may replace files in {directory}: chmod o-w {directory}"
    return ""


def locks_directory(socket_path: str) -> Path:
    """Return the directory of the clients' lock files, which the sidecar creates."""
    return Path(socket_path).parent / "clients"


def lock_path(socket_path: str, client_uuid: bytes) -> Path:
    """Return the path of the file on which a client holds a POSIX record lock as long as it is alive."""
    return locks_directory(socket_path) / f"{client_uuid.hex()}.lock"


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of a refused call from REASON_METADATA; empty if there is none."""
    metadata = cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())
    return next((value for key, value in metadata if key == REASON_METADATA), "")
