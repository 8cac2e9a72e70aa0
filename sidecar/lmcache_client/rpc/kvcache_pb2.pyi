from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]

class Copier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COPIER_UNSPECIFIED: _ClassVar[Copier]
    COPIER_ENGINE: _ClassVar[Copier]
    COPIER_SIDECAR: _ClassVar[Copier]

class Reservation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVATION_UNSPECIFIED: _ClassVar[Reservation]
    SLOT: _ClassVar[Reservation]
    EXISTS: _ClassVar[Reservation]
    BUSY: _ClassVar[Reservation]

class HintKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_KIND_UNSPECIFIED: _ClassVar[HintKind]
    RETAIN: _ClassVar[HintKind]
    PREFETCH: _ClassVar[HintKind]
    RELEASE: _ClassVar[HintKind]

class HintOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_OUTCOME_UNSPECIFIED: _ClassVar[HintOutcome]
    HINT_ACCEPTED: _ClassVar[HintOutcome]
    HINT_CLIPPED: _ClassVar[HintOutcome]
    HINT_DEFERRED: _ClassVar[HintOutcome]
    HINT_REFUSED: _ClassVar[HintOutcome]
ROLE_UNSPECIFIED: Role
ROLE_SCHEDULER: Role
ROLE_WORKER: Role
COPIER_UNSPECIFIED: Copier
COPIER_ENGINE: Copier
COPIER_SIDECAR: Copier
RESERVATION_UNSPECIFIED: Reservation
SLOT: Reservation
EXISTS: Reservation
BUSY: Reservation
HINT_KIND_UNSPECIFIED: HintKind
RETAIN: HintKind
PREFETCH: HintKind
RELEASE: HintKind
HINT_OUTCOME_UNSPECIFIED: HintOutcome
HINT_ACCEPTED: HintOutcome
HINT_CLIPPED: HintOutcome
HINT_DEFERRED: HintOutcome
HINT_REFUSED: HintOutcome

class AttachRequest(_message.Message):
    __slots__ = ("hello", "drained", "extents_released", "pinned")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    drained: Drained
    extents_released: ExtentsReleased
    pinned: Pinned
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., extents_released: _Optional[_Union[ExtentsReleased, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("attached", "extents", "copier")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    COPIER_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    extents: Extents
    copier: StoreCopier
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., extents: _Optional[_Union[Extents, _Mapping]] = ..., copier: _Optional[_Union[StoreCopier, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "client_version", "client_uuid", "engine_uuid", "pid", "uid", "role", "namespace", "private_reason", "geometry", "column", "model", "transfer", "kv_bytes", "numa_nodes", "computes_on_cpu", "num_parts")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_UUID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_REASON_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_ON_CPU_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_version: str
    client_uuid: bytes
    engine_uuid: bytes
    pid: int
    uid: int
    role: Role
    namespace: bytes
    private_reason: str
    geometry: Geometry
    column: int
    model: str
    transfer: TransferOffer
    kv_bytes: int
    numa_nodes: _containers.RepeatedScalarFieldContainer[int]
    computes_on_cpu: bool
    num_parts: int
    def __init__(self, protocol_version: _Optional[int] = ..., client_version: _Optional[str] = ..., client_uuid: _Optional[bytes] = ..., engine_uuid: _Optional[bytes] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., namespace: _Optional[bytes] = ..., private_reason: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., column: _Optional[int] = ..., model: _Optional[str] = ..., transfer: _Optional[_Union[TransferOffer, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., numa_nodes: _Optional[_Iterable[int]] = ..., computes_on_cpu: bool = ..., num_parts: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("chunk_tokens", "num_columns", "groups")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    num_columns: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    def __init__(self, chunk_tokens: _Optional[int] = ..., num_columns: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("group", "kind", "block_tokens", "chunk_bytes", "window_tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[KVGroup.Kind]
        FULL_ATTENTION: _ClassVar[KVGroup.Kind]
        SLIDING_WINDOW: _ClassVar[KVGroup.Kind]
        CHUNKED_ATTENTION: _ClassVar[KVGroup.Kind]
        STATE: _ClassVar[KVGroup.Kind]
    KIND_UNSPECIFIED: KVGroup.Kind
    FULL_ATTENTION: KVGroup.Kind
    SLIDING_WINDOW: KVGroup.Kind
    CHUNKED_ATTENTION: KVGroup.Kind
    STATE: KVGroup.Kind
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: KVGroup.Kind
    block_tokens: int
    chunk_bytes: int
    window_tokens: int
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[_Union[KVGroup.Kind, str]] = ..., block_tokens: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class TransferOffer(_message.Message):
    __slots__ = ("gpu_uuid", "allocations", "groups", "refusal")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    allocations: _containers.RepeatedCompositeFieldContainer[DeviceAllocation]
    groups: _containers.RepeatedCompositeFieldContainer[GroupPages]
    refusal: str
    def __init__(self, gpu_uuid: _Optional[str] = ..., allocations: _Optional[_Iterable[_Union[DeviceAllocation, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupPages, _Mapping]]] = ..., refusal: _Optional[str] = ...) -> None: ...

class DeviceAllocation(_message.Message):
    __slots__ = ("ipc_handle", "num_bytes")
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ipc_handle: bytes
    num_bytes: int
    def __init__(self, ipc_handle: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class GroupPages(_message.Message):
    __slots__ = ("group", "num_blocks", "blocks_per_row", "layers")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    group: int
    num_blocks: int
    blocks_per_row: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPages]
    def __init__(self, group: _Optional[int] = ..., num_blocks: _Optional[int] = ..., blocks_per_row: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPages, _Mapping]]] = ...) -> None: ...

class LayerPages(_message.Message):
    __slots__ = ("allocation", "offset", "page_bytes", "block_stride")
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    allocation: int
    offset: int
    page_bytes: int
    block_stride: int
    def __init__(self, allocation: _Optional[int] = ..., offset: _Optional[int] = ..., page_bytes: _Optional[int] = ..., block_stride: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("protocol_version", "server_version", "epoch", "store_copier", "copier_reason", "arena_path", "table_offset", "column_offset", "slot_bytes", "num_rows", "ready_rows", "index_offset", "index_buckets", "memory_only", "slots_per_frame")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_COPIER_FIELD_NUMBER: _ClassVar[int]
    COPIER_REASON_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    TABLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    COLUMN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    READY_ROWS_FIELD_NUMBER: _ClassVar[int]
    INDEX_OFFSET_FIELD_NUMBER: _ClassVar[int]
    INDEX_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ONLY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    epoch: int
    store_copier: Copier
    copier_reason: str
    arena_path: str
    table_offset: int
    column_offset: int
    slot_bytes: int
    num_rows: int
    ready_rows: int
    index_offset: int
    index_buckets: int
    memory_only: bool
    slots_per_frame: int
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., epoch: _Optional[int] = ..., store_copier: _Optional[_Union[Copier, str]] = ..., copier_reason: _Optional[str] = ..., arena_path: _Optional[str] = ..., table_offset: _Optional[int] = ..., column_offset: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ..., ready_rows: _Optional[int] = ..., index_offset: _Optional[int] = ..., index_buckets: _Optional[int] = ..., memory_only: bool = ..., slots_per_frame: _Optional[int] = ...) -> None: ...

class Extents(_message.Message):
    __slots__ = ("ready_rows", "round")
    READY_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ready_rows: int
    round: int
    def __init__(self, ready_rows: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class ExtentsReleased(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("pinned_bytes", "num_failures", "problem")
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    pinned_bytes: int
    num_failures: int
    problem: str
    def __init__(self, pinned_bytes: _Optional[int] = ..., num_failures: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class StoreCopier(_message.Message):
    __slots__ = ("store_copier", "reason")
    STORE_COPIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    store_copier: Copier
    reason: str
    def __init__(self, store_copier: _Optional[_Union[Copier, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "request_id", "groups", "prefill_tokens_per_second", "hint", "tenant", "scheduled", "num_handed_over_chunks", "private_reason", "relayed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDED_OVER_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_REASON_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    request_id: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupKeys]
    prefill_tokens_per_second: float
    hint: bool
    tenant: bytes
    scheduled: Scheduled
    num_handed_over_chunks: int
    private_reason: str
    relayed: bool
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., request_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupKeys, _Mapping]]] = ..., prefill_tokens_per_second: _Optional[float] = ..., hint: bool = ..., tenant: _Optional[bytes] = ..., scheduled: _Optional[_Union[Scheduled, _Mapping]] = ..., num_handed_over_chunks: _Optional[int] = ..., private_reason: _Optional[str] = ..., relayed: bool = ...) -> None: ...

class Scheduled(_message.Message):
    __slots__ = ("num_engine_chunks", "num_hit_chunks", "num_loaded_tokens", "num_prompt_tokens", "num_engine_tokens", "first_blocks", "block_tokens", "reports_times", "uncached_reason", "num_blended_tokens")
    NUM_ENGINE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_TIMES_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_engine_chunks: int
    num_hit_chunks: int
    num_loaded_tokens: int
    num_prompt_tokens: int
    num_engine_tokens: int
    first_blocks: bytes
    block_tokens: int
    reports_times: bool
    uncached_reason: str
    num_blended_tokens: int
    def __init__(self, num_engine_chunks: _Optional[int] = ..., num_hit_chunks: _Optional[int] = ..., num_loaded_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_engine_tokens: _Optional[int] = ..., first_blocks: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., reports_times: bool = ..., uncached_reason: _Optional[str] = ..., num_blended_tokens: _Optional[int] = ...) -> None: ...

class GroupKeys(_message.Message):
    __slots__ = ("group", "keys")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("num_resident", "num_leased", "num_pending", "probing")
    NUM_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    PROBING_FIELD_NUMBER: _ClassVar[int]
    num_resident: int
    num_leased: int
    num_pending: int
    probing: bool
    def __init__(self, num_resident: _Optional[int] = ..., num_leased: _Optional[int] = ..., num_pending: _Optional[int] = ..., probing: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "request_ids", "times")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    times: _containers.RepeatedCompositeFieldContainer[RequestTimes]
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., request_ids: _Optional[_Iterable[str]] = ..., times: _Optional[_Iterable[_Union[RequestTimes, _Mapping]]] = ...) -> None: ...

class RequestTimes(_message.Message):
    __slots__ = ("request_id", "lookup_seconds", "wait_seconds", "load_seconds", "first_token_seconds", "num_failed_tokens", "num_blended_tokens", "num_recomputed_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lookup_seconds: float
    wait_seconds: float
    load_seconds: float
    first_token_seconds: float
    num_failed_tokens: int
    num_blended_tokens: int
    num_recomputed_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., lookup_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., num_failed_tokens: _Optional[int] = ..., num_blended_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "group", "keys", "tenant", "first_chunk", "request_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    group: int
    keys: bytes
    tenant: bytes
    first_chunk: int
    request_id: str
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., group: _Optional[int] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[bytes] = ..., first_chunk: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("results", "slots")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[Reservation]
    slots: bytes
    def __init__(self, results: _Optional[_Iterable[_Union[Reservation, str]]] = ..., slots: _Optional[bytes] = ...) -> None: ...

class CopyBlocksRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "groups")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    groups: _containers.RepeatedCompositeFieldContainer[GroupCopies]
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[GroupCopies, _Mapping]]] = ...) -> None: ...

class GroupCopies(_message.Message):
    __slots__ = ("group", "slots", "blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    slots: bytes
    blocks: bytes
    def __init__(self, group: _Optional[int] = ..., slots: _Optional[bytes] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class CopyBlocksReply(_message.Message):
    __slots__ = ("copied",)
    COPIED_FIELD_NUMBER: _ClassVar[int]
    copied: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, copied: _Optional[_Iterable[bool]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "slots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    slots: bytes
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., slots: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "slots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    slots: bytes
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., slots: _Optional[bytes] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShareMarksRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "marks", "since")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    marks: bytes
    since: int
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., marks: _Optional[bytes] = ..., since: _Optional[int] = ...) -> None: ...

class ShareMarksReply(_message.Message):
    __slots__ = ("marks", "since")
    MARKS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    marks: bytes
    since: int
    def __init__(self, marks: _Optional[bytes] = ..., since: _Optional[int] = ...) -> None: ...

class ApplyHintsRequest(_message.Message):
    __slots__ = ("epoch", "client_uuid", "request_id", "groups", "tenant", "message_id", "actions", "answer_id", "refusals")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UUID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_uuid: bytes
    request_id: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupKeys]
    tenant: bytes
    message_id: str
    actions: _containers.RepeatedCompositeFieldContainer[HintAction]
    answer_id: str
    refusals: _containers.RepeatedCompositeFieldContainer[HintDecision]
    def __init__(self, epoch: _Optional[int] = ..., client_uuid: _Optional[bytes] = ..., request_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupKeys, _Mapping]]] = ..., tenant: _Optional[bytes] = ..., message_id: _Optional[str] = ..., actions: _Optional[_Iterable[_Union[HintAction, _Mapping]]] = ..., answer_id: _Optional[str] = ..., refusals: _Optional[_Iterable[_Union[HintDecision, _Mapping]]] = ...) -> None: ...

class HintAction(_message.Message):
    __slots__ = ("action_id", "kind", "begin_token", "end_token", "ttl_seconds", "priority")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    kind: HintKind
    begin_token: int
    end_token: int
    ttl_seconds: float
    priority: int
    def __init__(self, action_id: _Optional[str] = ..., kind: _Optional[_Union[HintKind, str]] = ..., begin_token: _Optional[int] = ..., end_token: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class HintDecision(_message.Message):
    __slots__ = ("action_id", "outcome", "reason", "num_tokens", "ttl_seconds")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    outcome: HintOutcome
    reason: str
    num_tokens: int
    ttl_seconds: float
    def __init__(self, action_id: _Optional[str] = ..., outcome: _Optional[_Union[HintOutcome, str]] = ..., reason: _Optional[str] = ..., num_tokens: _Optional[int] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class ApplyHintsReply(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[HintDecision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[HintDecision, _Mapping]]] = ...) -> None: ...

class ReadHintsRequest(_message.Message):
    __slots__ = ("answer_id",)
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    answer_id: str
    def __init__(self, answer_id: _Optional[str] = ...) -> None: ...
