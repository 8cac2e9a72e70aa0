"""Checks and parses messages, so that an invalid message is refused before it changes anything.

Each function raises CallRefusedError with a sentence that says what to do. Lengths and counts are bounded, so
that no message can cost more than its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import grpc
import numpy as np

import lmcache_store
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.times import RequestTimes
from lmcache_sidecar.explain.open_requests import EndedRequest
from lmcache_sidecar.marks import Marks
from lmcache_store.hints import MAX_ACTIONS, MAX_PRIORITY, HintAction, HintKind
from lmcache_store.kv_groups import GroupKind, KVGroup, stored_blocks
from lmcache_store.tiers.base import KEY_BYTES, ROW_KEY_BYTES, RowKey
from lmcache_store.tiers.budgets import short_tenant
from lmcache_store.tiers.memory.allocator import best_slots_per_frame
from lmcache_store.tiers.memory.contracts import Chains, Geometry, Slot
from lmcache_store.tiers.pages import PAGE_BYTES

_UUID_BYTES = 16
MAX_GROUPS = 64
_MAX_COLUMNS = 1024
_MAX_CHUNK_BYTES = 1 << 40
_HINT_KINDS = {pb.RETAIN: HintKind.RETAIN, pb.PREFETCH: HintKind.PREFETCH, pb.RELEASE: HintKind.RELEASE}
_KINDS = {kind.value: kind for kind in GroupKind}


class CallRefusedError(Exception):
    """A refused call, with the message for people, and a ``reason`` if the client's code reacts to it."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


def invalid(message: str) -> CallRefusedError:
    """Return the error for a message that is wrong in any state of the sidecar."""
    return CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


def precondition(message: str, reason: str = "") -> CallRefusedError:
    """Return the error for a message that does not fit the sidecar's present state."""
    return CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, message, reason)


@dataclass(frozen=True)
class ParsedHello:
    """The checked Hello of a client, and the values derived from it."""

    hello: pb.Hello
    geometry: Geometry
    groups: dict[int, KVGroup]
    """KV groups by number."""

    @property
    def uuid(self) -> bytes:
        """UUID of the client."""
        return self.hello.client_uuid

    @property
    def engine(self) -> bytes:
        """UUID of the client's engine."""
        return self.hello.engine_uuid

    @property
    def chunk_bytes(self) -> dict[int, int]:
        """Bytes of a chunk in one column, by KV group; 0: the group stores nothing."""
        return {number: group.chunk_bytes for number, group in self.groups.items()}

    @cached_property
    def storing(self) -> list[int]:
        """Sorted numbers of the groups that store KV."""
        return sorted(number for number, group in self.groups.items() if group.chunk_bytes)

    @property
    def is_worker(self) -> bool:
        """True for a rank, False for the scheduler."""
        return self.hello.role == pb.ROLE_WORKER

    @property
    def num_workers(self) -> int:
        """Workers of the engine for which this rank stands: one on each of its nodes. 0: a scheduler."""
        return max(1, self.hello.num_parts) if self.is_worker else 0

    def __str__(self) -> str:
        role = f"worker of column {self.hello.column}" if self.is_worker else "scheduler"
        reason = self.hello.private_reason
        private = f", private keys ({reason})" if reason else ""
        return f"{role}, pid {self.hello.pid}, model {self.hello.model!r}{private}"

    @property
    def layout(self) -> tuple[object, ...]:
        """Values that all clients of one engine must have in common."""
        chunk_tokens = self.hello.geometry.chunk_tokens
        private = bool(self.hello.private_reason)
        return self.hello.namespace, self.geometry, chunk_tokens, self.groups, private


def parse_hello(hello: pb.Hello) -> ParsedHello:
    """Parse a Hello. Checks everything that does not depend on other clients."""
    _check_protocol(hello)
    lengths = {"client_uuid": _UUID_BYTES, "engine_uuid": _UUID_BYTES, "namespace": KEY_BYTES}
    for name, num_bytes in lengths.items():
        length = len(getattr(hello, name))
        require(length == num_bytes, f"{name} must have {num_bytes} bytes, it has {length}")
    require(hello.role in (pb.ROLE_SCHEDULER, pb.ROLE_WORKER), "role must be ROLE_SCHEDULER or ROLE_WORKER")
    for name in ("client_version", "private_reason", "model"):
        check_length(name, getattr(hello, name).encode())
    num_columns, num_groups = hello.geometry.num_columns, len(hello.geometry.groups)
    require(1 <= num_columns <= _MAX_COLUMNS, f"num_columns must be 1 to {_MAX_COLUMNS}, it is {num_columns}")
    require(hello.column < num_columns, f"column {hello.column} is not below num_columns, {num_columns}")
    require(hello.num_parts <= _MAX_COLUMNS, f"num_parts must be at most {_MAX_COLUMNS}")
    require(len(hello.numa_nodes) in (0, num_columns), f"numa_nodes must name none or {num_columns} nodes")
    require(1 <= num_groups <= MAX_GROUPS, f"geometry must have 1 to {MAX_GROUPS} groups, not {num_groups}")
    groups = {
        group.group: _parse_group(group, hello.geometry.chunk_tokens) for group in hello.geometry.groups
    }
    require(len(groups) == num_groups, "every group must have a different number")
    row_bytes = [group.chunk_bytes for group in groups.values() if group.chunk_bytes]
    require(bool(row_bytes), "at least one group must store KV")
    slots_per_frame, slot_bytes = best_slots_per_frame(row_bytes, PAGE_BYTES)
    return ParsedHello(hello, Geometry(slot_bytes, num_columns, slots_per_frame), groups)


def parse_lookup(request: pb.LookupRequest, peer: ParsedHello) -> Chains:
    """Return the row keys of all groups that store KV."""
    if not 0 <= request.prefill_tokens_per_second < math.inf:
        raise invalid("prefill_tokens_per_second must be a finite number, or 0 if it is not known")
    check_length("private_reason", request.private_reason.encode())
    check_length("uncached_reason", request.scheduled.uncached_reason.encode())
    blocks = request.scheduled.first_blocks
    check_length("first_blocks", blocks, service.MAX_FIRST_BLOCKS * service.NAME_BYTES)
    _check_multiple("first_blocks", blocks, service.NAME_BYTES)
    return parse_chains(request, peer, request.num_handed_over_chunks)


def parse_chains(
    request: pb.LookupRequest | pb.ApplyHintsRequest, peer: ParsedHello, num_handed_over: int = 0
) -> Chains:
    """Return the row keys of a request in all groups that store KV."""
    parse_request_id(request.request_id)
    numbers = [group.group for group in request.groups]
    if sorted(numbers) != peer.storing:
        raise invalid(f"groups must contain each of {peer.storing} once, they are {numbers[:MAX_GROUPS]}")
    tenant = parse_tenant(request.tenant)
    _check_num_keys(sum(len(group.keys) for group in request.groups), service.MAX_KEYS_PER_LOOKUP)
    keys = tuple(_split_keys(group.keys) for group in request.groups)
    require(len(set(map(len, keys))) == 1, "each group must have the same number of keys, one for each chunk")
    groups = tuple(peer.groups[number] for number in numbers)
    num_handed_over = min(num_handed_over, len(keys[0])) if keys else 0
    return Chains(peer.hello.geometry.chunk_tokens, groups, keys, tenant, num_handed_over)


def parse_reserve(request: pb.ReserveRequest, peer: ParsedHello) -> list[RowKey]:
    """Return the row keys, in the order of the chain."""
    if request.group not in peer.storing:
        raise invalid(
            f"group {request.group} is unknown or stores no KV: the groups that do are {peer.storing}"
        )
    if request.request_id:
        parse_request_id(request.request_id)
    _check_num_keys(len(request.keys), service.MAX_KEYS_PER_CALL)
    return _split_keys(request.keys)


def parse_tenant(tenant: bytes) -> bytes:
    """Return the tenant of a message, as the store knows it."""
    check_length("tenant", tenant)
    return short_tenant(tenant)


def parse_pinned(message: pb.Pinned, peer: ParsedHello) -> PinStatus:
    """Return how much of its column a worker has pinned."""
    require(peer.is_worker, "only a worker can pin memory: this client is attached as the scheduler")
    check_length("problem", message.problem.encode())
    return PinStatus(message.pinned_bytes, message.num_failures, message.problem)


def parse_slots(packed: bytes, num_rows: int) -> list[Slot]:
    """Return the slots of a Commit, Abort or CopyBlocks."""
    _check_multiple("slots", packed, service.SLOT_BYTES)
    # Checked before unpacking: a message may hold a quarter of a million slots.
    is_short = len(packed) <= service.MAX_KEYS_PER_CALL * service.SLOT_BYTES
    slots = service.unpack_slots(packed) if is_short else []
    if not is_short or len({slot.row for slot in slots}) != len(slots):
        raise invalid(f"slots must be of different rows, at most {service.MAX_KEYS_PER_CALL}")
    if (highest := max(slots, default=Slot(-1, 0)).row) >= num_rows:
        raise invalid(f"row {highest} is out of range: the arena has {num_rows} rows")
    return slots


def parse_request_id(request_id: str) -> str:
    """Return the request id if its length is valid."""
    require(bool(request_id), "request_id must not be empty")
    check_length("request_id", request_id.encode(), service.MAX_REQUEST_ID_BYTES)
    return request_id


def parse_times(request: pb.ReleaseRequest, engine: bytes) -> list[EndedRequest]:
    """Return the ended requests of a Release, with their times."""
    require(len(request.times) <= service.MAX_TIMES, f"times must be of at most {service.MAX_TIMES} requests")
    ended = []
    for taken in request.times:
        seconds = (
            taken.lookup_seconds, taken.wait_seconds, taken.load_seconds, taken.first_token_seconds,
        )  # fmt: skip
        is_valid = all(0 <= number < math.inf for number in seconds)
        require(is_valid, "the times of a request must be finite numbers of seconds, 0 or more")
        request_id = parse_request_id(taken.request_id)
        tokens = taken.num_failed_tokens, taken.num_blended_tokens, taken.num_recomputed_tokens
        ended.append(EndedRequest(engine, RequestTimes(request_id, *seconds, *tokens)))
    return ended


def parse_actions(request: pb.ApplyHintsRequest) -> list[HintAction]:
    """Return the actions of an ApplyHints."""
    num_actions = max(len(request.actions), len(request.refusals))
    require(num_actions <= MAX_ACTIONS + 1, f"at most {MAX_ACTIONS} actions are allowed")
    for name in ("message_id", "answer_id"):
        check_length(name, getattr(request, name).encode())
    for refusal in request.refusals:
        check_length("action_id", refusal.action_id.encode())
        check_length("reason", refusal.reason.encode())
    return list(map(_parse_action, request.actions))


def _parse_action(action: pb.HintAction) -> HintAction:
    check_length("action_id", action.action_id.encode())
    require(action.kind in _HINT_KINDS, "kind must be RETAIN, PREFETCH or RELEASE")
    kind = _HINT_KINDS[action.kind]
    is_valid = kind is not HintKind.RETAIN or 0 < action.ttl_seconds < math.inf
    require(is_valid, "ttl_seconds must be a finite number above 0")
    is_valid = abs(action.priority) <= MAX_PRIORITY
    require(is_valid, f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    tokens = action.begin_token, action.end_token
    return HintAction(action.action_id, kind, *tokens, action.ttl_seconds, action.priority)


def parse_marks(packed: bytes) -> Marks:
    """Return the marks of a ShareMarks."""
    check_length("marks", packed, service.MAX_MARKS_PER_CALL * service.MARK_BYTES)
    _check_multiple("marks", packed, service.MARK_BYTES)
    return np.frombuffer(packed, "<u8")


def _check_protocol(hello: pb.Hello) -> None:
    ours, theirs = service.PROTOCOL_VERSION, hello.protocol_version
    if theirs != ours:
        older = "the engine's LMCache" if theirs < ours else "the sidecar"
        raise precondition(
            f"the engine's LMCache {hello.client_version[:64]!r} speaks protocol {theirs}, sidecar"
            f" {lmcache_store.__version__} speaks {ours}: upgrade {older}",
            service.REASON_PROTOCOL,
        )


def _parse_group(group: pb.KVGroup, chunk_tokens: int) -> KVGroup:
    require(group.kind in _KINDS, f"group {group.group} must have a known kind")
    kind = _KINDS[group.kind]
    require(
        0 < group.block_tokens <= chunk_tokens and chunk_tokens % group.block_tokens == 0,
        f"chunk_tokens, {chunk_tokens}, must be a multiple of the block_tokens of group {group.group},"
        f" {group.block_tokens}",
    )
    has_window = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_ATTENTION)
    require(
        has_window == (group.window_tokens > 0),
        f"window_tokens of group {group.group}, {kind.name}, must {'' if has_window else 'not '}be given",
    )
    parsed = KVGroup(group.group, group.block_tokens, group.chunk_bytes, group.window_tokens, kind)
    has_rows = stored_blocks(parsed, chunk_tokens) > 0
    require(
        (1 if has_rows else 0) <= group.chunk_bytes <= (_MAX_CHUNK_BYTES if has_rows else 0),
        f"chunk_bytes of group {group.group} is out of range: {group.chunk_bytes}",
    )
    return parsed


def _check_num_keys(num_bytes: int, limit: int) -> None:
    if num_bytes > limit * ROW_KEY_BYTES:
        raise invalid(f"a call accepts at most {limit} keys: send fewer keys per call")


def _split_keys(keys: bytes) -> list[RowKey]:
    _check_multiple("keys", keys, ROW_KEY_BYTES)
    return [keys[start : start + ROW_KEY_BYTES] for start in range(0, len(keys), ROW_KEY_BYTES)]


def _check_multiple(name: str, value: bytes, item_bytes: int) -> None:
    if len(value) % item_bytes:
        raise invalid(f"{name} must have {item_bytes} bytes each, {len(value)} bytes are not a multiple")


def check_length(name: str, value: bytes, limit: int = service.MAX_TEXT_BYTES) -> None:
    """Raise CallRefusedError if a value is longer than ``limit`` bytes."""
    if len(value) > limit:
        raise invalid(f"{name} has {len(value)} bytes, at most {limit} are allowed")


def require(is_valid: bool, sentence: str) -> None:
    """Raise CallRefusedError with this sentence unless ``is_valid``."""
    if not is_valid:
        raise invalid(sentence)
