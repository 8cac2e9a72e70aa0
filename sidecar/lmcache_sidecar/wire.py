"""From messages to values: everything a peer may get wrong is found here, before anything is changed.

Each function raises Refused with a sentence that says what to do. Lengths and counts are bounded, so that no
message can cost more than its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

import lmcache
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.tiers.base import KEY_BYTES, Geometry, RowKey, Slot

_UUID_BYTES = 16
_MAX_TEXT_BYTES = 512
_MAX_GROUPS = 64
_MAX_COLUMNS = 1024
_MAX_CHUNK_BYTES = 1 << 40
_PAGE_BYTES = 4096


class Refused(Exception):
    """A call that is not done, and why; ``reason`` is set where the client's code acts upon it."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


def invalid(message: str) -> Refused:
    """The message itself is wrong, whatever the sidecar's state."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def precondition(message: str, reason: str = "") -> Refused:
    """The message does not fit the sidecar's state."""
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, message, reason)


@dataclass(frozen=True)
class Peer:
    """A client as its Hello describes it."""

    uuid: bytes
    engine: bytes
    role: pb.Role
    namespace: bytes
    private_reason: str
    geometry: Geometry
    chunk_bytes: dict[int, int]  # by group
    column: int
    pid: int
    uid: int
    model: str
    version: str
    has_gpu: bool

    @property
    def layout(self) -> tuple[object, ...]:
        """What all clients of one engine have in common."""
        return self.namespace, self.geometry, self.chunk_bytes, bool(self.private_reason)


def parse_hello(hello: pb.Hello) -> Peer:
    """Check everything in a Hello that can be checked without looking at other clients."""
    _check_protocol(hello)
    for name in ("client_uuid", "engine_uuid"):
        if len(getattr(hello, name)) != _UUID_BYTES:
            raise invalid(f"{name} must have {_UUID_BYTES} bytes, it has {len(getattr(hello, name))}")
    if len(hello.namespace) != KEY_BYTES:
        raise invalid(f"namespace must have {KEY_BYTES} bytes, it has {len(hello.namespace)}")
    if hello.role not in (pb.ROLE_SCHEDULER, pb.ROLE_WORKER):
        raise invalid("role must be ROLE_SCHEDULER or ROLE_WORKER")
    for name in ("client_version", "private_reason", "model"):
        _check_length(name, getattr(hello, name).encode(), _MAX_TEXT_BYTES)
    geometry = hello.geometry
    if not 1 <= geometry.num_columns <= _MAX_COLUMNS:
        raise invalid(f"num_columns must be 1 to {_MAX_COLUMNS}, it is {geometry.num_columns}")
    if hello.column >= geometry.num_columns:
        raise invalid(f"column {hello.column} is not below num_columns, {geometry.num_columns}")
    chunk_bytes = _parse_groups(geometry)
    return Peer(
        uuid=hello.client_uuid,
        engine=hello.engine_uuid,
        role=hello.role,
        namespace=hello.namespace,
        private_reason=hello.private_reason,
        geometry=Geometry(_round_up(max(chunk_bytes.values())), geometry.num_columns),
        chunk_bytes=chunk_bytes,
        column=hello.column,
        pid=hello.pid,
        uid=hello.uid,
        model=hello.model,
        version=hello.client_version,
        has_gpu=bool(hello.transfer.gpu_uuid),
    )


def parse_lookup(request: pb.LookupRequest, peer: Peer) -> list[list[RowKey]]:
    """Row keys per group, in the order of the request."""
    parse_request_id(request.request_id)
    _check_length("tenant", request.tenant, _MAX_TEXT_BYTES)
    if not 0 <= request.prefill_tokens_per_second < math.inf:
        raise invalid("prefill_tokens_per_second must be a finite number, 0 when it is not known")
    groups = [group.group for group in request.groups]
    if sorted(groups) != sorted(peer.chunk_bytes):
        raise invalid(
            f"groups must be each of {sorted(peer.chunk_bytes)} once, they are {groups[:_MAX_GROUPS]}"
        )
    if len({len(group.keys) for group in request.groups}) > 1:
        raise invalid("all groups must have the same number of keys")
    if sum(len(group.keys) for group in request.groups) > service.MAX_KEYS_PER_CALL * KEY_BYTES:
        raise invalid(f"a call takes at most {service.MAX_KEYS_PER_CALL} keys: ask for fewer at once")
    return [_split_keys(peer.namespace, group.keys) for group in request.groups]


def parse_reserve(request: pb.ReserveRequest, peer: Peer) -> list[RowKey]:
    """Row keys in the order of the chain."""
    if request.group not in peer.chunk_bytes:
        raise invalid(f"group {request.group} is unknown: the Hello had {sorted(peer.chunk_bytes)}")
    _check_length("tenant", request.tenant, _MAX_TEXT_BYTES)
    if len(request.keys) > service.MAX_KEYS_PER_CALL * KEY_BYTES:
        raise invalid(f"a call takes at most {service.MAX_KEYS_PER_CALL} keys: reserve fewer at once")
    return _split_keys(peer.namespace, request.keys)


def parse_slots(rows: Sequence[int], generations: Sequence[int], num_rows: int) -> list[Slot]:
    """The slots that a Commit or Abort names."""
    if len(rows) != len(generations):
        raise invalid(f"{len(rows)} rows but {len(generations)} generations: send one generation per row")
    if len(rows) > service.MAX_KEYS_PER_CALL or len(set(rows)) != len(rows):
        raise invalid(f"rows must be different ones, at most {service.MAX_KEYS_PER_CALL}")
    for row in rows:
        if row >= num_rows:
            raise invalid(f"row {row} is out of range: the arena has {num_rows} rows")
    return list(map(Slot._make, zip(rows, generations, strict=True)))


def parse_request_id(request_id: str) -> str:
    """A request id of a bearable length."""
    if not request_id:
        raise invalid("request_id must not be empty")
    _check_length("request_id", request_id.encode(), service.MAX_REQUEST_ID_BYTES)
    return request_id


def _check_protocol(hello: pb.Hello) -> None:
    ours, theirs = service.PROTOCOL_VERSION, hello.protocol_version
    if theirs != ours:
        older = "the engine's LMCache" if theirs < ours else "the sidecar"
        raise precondition(
            f"the engine's LMCache {hello.client_version[:64]!r} speaks protocol {theirs}, sidecar"
            f" {lmcache.__version__} speaks {ours}: upgrade {older}",
            service.REASON_PROTOCOL,
        )


def _parse_groups(geometry: pb.Geometry) -> dict[int, int]:
    if not 1 <= len(geometry.groups) <= _MAX_GROUPS:
        raise invalid(f"geometry must have 1 to {_MAX_GROUPS} groups, it has {len(geometry.groups)}")
    for group in geometry.groups:
        if group.kind == pb.KVGroup.SLIDING_WINDOW:
            raise precondition(
                f"group {group.group} is a sliding window: this sidecar serves full attention only,"
                " sliding window groups come with a later version"
            )
        if group.kind != pb.KVGroup.FULL_ATTENTION:
            raise invalid(f"group {group.group} must say its kind")
        if not group.block_tokens or not geometry.chunk_tokens or geometry.chunk_tokens % group.block_tokens:
            raise invalid(
                f"chunk_tokens, {geometry.chunk_tokens}, must be a multiple of the block_tokens of group"
                f" {group.group}, {group.block_tokens}"
            )
        if not 1 <= group.chunk_bytes <= _MAX_CHUNK_BYTES:
            raise invalid(f"chunk_bytes of group {group.group} is out of range: {group.chunk_bytes}")
    chunk_bytes = {group.group: group.chunk_bytes for group in geometry.groups}
    if len(chunk_bytes) != len(geometry.groups):
        raise invalid("every group must have a number of its own")
    return chunk_bytes


def _split_keys(namespace: bytes, keys: bytes) -> list[RowKey]:
    if len(keys) % KEY_BYTES:
        raise invalid(f"keys must have {KEY_BYTES} bytes each, {len(keys)} bytes are no multiple of that")
    # As row_key() does, without a call per key: this is the longest part of a lookup outside the tiers.
    return [namespace + keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def _check_length(name: str, value: bytes, limit: int) -> None:
    if len(value) > limit:
        raise invalid(f"{name} has {len(value)} bytes, at most {limit} are taken")


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
