"""Statistics of the sidecar: facts for people, and figures that are also metrics.

Each figure is declared once, with its name and a description: gauges here, counters where they are counted
(``lmcache_store.tiers.stats``). The declarations produce ``/stats``, ``/metrics`` and
docs/reference/stats.md.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.copiers.copier import Mode
from lmcache_sidecar.copiers.jobs import CopyStats
from lmcache_sidecar.explain.benefit_stats import BenefitStats
from lmcache_sidecar.explain.causes import Causes, CauseStats
from lmcache_sidecar.lower_tiers import TierHandle
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.samples import LookupSampler, LookupStats
from lmcache_sidecar.sessions import Sessions
from lmcache_store.tiers.base import LowerTier
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Arena
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.stats import MemoryStats, TieredStats
from lmcache_store.tiers.tiered.tier_worker import TierWorker

T = TypeVar("T")

MAX_LISTED_CLIENTS = 64
"""Clients that the figures list, those that attached first: the operator reads at most 256 KiB of figures."""

_NUM_BRANCHES = 10
_MAX_MODELS = 8


@dataclass(frozen=True)
class Figure(Generic[T]):
    """Declaration of a number, or of one number per value of ``label``.

    Several labels have blanks between them, and so have their values.
    """

    name: str
    about: str
    read: Callable[[T], Any]
    label: str = ""
    is_counter: bool = False

    @property
    def metric(self) -> str:
        """Name in Prometheus, without the prefix of its part."""
        return re.sub("^(num|is)_", "", self.name) + ("_total" if self.is_counter else "")


@dataclass(frozen=True)
class StatsPart:
    """Statistics of one part of the sidecar. Figures without a source are left out."""

    name: str
    """Key in ``/stats``; empty for the sidecar itself, whose keys are on the top level."""

    facts: Mapping[str, Any]
    """Texts and structures for people, which are not metrics."""

    figures: Mapping[Figure[Any], Any]
    """Figures with their values; the value of a figure with a label is a mapping."""

    prefix: str = "lmcache"
    """Prefix of the metrics' names."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of all metrics of this part."""


def read(figures: Iterable[Figure[T]], source: T | None) -> dict[Figure[Any], Any]:
    """Return the present values of figures; an empty dictionary if there is no source."""
    return {} if source is None else {figure: _plain(figure.read(source)) for figure in figures}


def document(parts: Iterable[StatsPart]) -> dict[str, Any]:
    """Return the content of ``/stats``: plain numbers and texts, by name."""
    content: dict[str, Any] = {}
    for part in parts:
        values = {**part.facts, **{figure.name: value for figure, value in part.figures.items()}}
        content |= {part.name: values} if part.name else values
    return content


def declared(kind: type[Any]) -> tuple[Figure[Any], ...]:
    """Return figures for the counters that a dataclass declares."""
    return tuple(
        Figure(count.name, read=attrgetter(count.name), is_counter=True, **count.metadata)
        for count in fields(kind)
        if "about" in count.metadata
    )


def _plain(value: Any) -> Any:
    """Replace enumeration members, which label some counters, by their values."""
    if not isinstance(value, dict):
        return value
    present = dict(value)  # one atomic copy: threads may still count
    return {getattr(key, "value", key): number for key, number in present.items()}


def _mode(client: Client) -> str:
    """Return the transfer mode of a worker; empty for a scheduler, which stores nothing."""
    mode = Mode.CUDA_IPC if client.transfer.is_ipc else Mode.SHARED_MEMORY
    return mode.value if client.peer.is_worker else ""


def transfer_facts(sessions: Sessions) -> dict[str, str]:
    """Return the requested transfer mode, and the slowest mode of all attached workers with its reason."""
    workers = [c for c in sessions.clients.by_uuid.values() if c.is_attached and c.peer.is_worker]
    facts = {"asked": sessions.copier.mode.value, "mode": "", "reason": "no engine is attached"}
    for worker in sorted(workers, key=lambda worker: worker.transfer.is_ipc)[:1]:
        facts |= {"mode": _mode(worker), "reason": worker.transfer.reason}
    return facts


def _engine_pins(sessions: Sessions) -> list[tuple[str, PinStatus]]:
    """Return a description and the pinned memory of each attached worker."""
    clients = [client for client in sessions.clients.by_uuid.values() if client.is_attached]
    return [(f"{client.name},", client.pins) for client in clients if client.pins is not None]


def _reader_pins(sessions: Sessions) -> list[tuple[str, PinStatus]]:
    return [(f"the reader of {uuid}", pins) for uuid, pins in sessions.copier.pins.items()]


def _pins_by_process(sessions: Sessions) -> dict[str, PinStatus]:
    named = {"engine": _engine_pins(sessions), "reader": _reader_pins(sessions)}
    return {process: PinStatus.total(pins for _, pins in statuses) for process, statuses in named.items()}


def pin_problem(sessions: Sessions) -> str:
    """Describe the first process that could not pin memory, with the reason; empty if none failed."""
    for name, pins in (*_engine_pins(sessions), *_reader_pins(sessions)):
        if pins.num_failures:
            return f"{name} could not pin {pins.num_failures} parts of the memory tier: {pins.problem}"
    return ""


def _benefit_facts(causes: Causes) -> dict[str, Any]:
    """Return what ``lmcache_store.explain.benefit`` needs and what is no metric, or a histogram there."""
    times = causes.times
    return {
        "first_tokens": causes.benefit.first_tokens,
        "unrated_tokens": causes.benefit.unrated_tokens,
        "lookup_seconds": times.lookup.seconds,
        "wait_seconds": times.wait.seconds,
        "load_seconds": {tier: loads.seconds for tier, loads in times.load.by_value.items()},
    }


def held_bytes(arena: ArenaFile, handles: Mapping[str, TierHandle]) -> dict[str, int]:
    """Return the bytes that this sidecar's own tiers take now: the size of memory, and the use of disk."""
    disk = handles["disk"].tier if "disk" in handles else None
    return {"memory": _size_bytes(arena), **({"disk": disk.used_bytes or 0} if disk is not None else {})}


def _size_bytes(arena: ArenaFile) -> int:
    return min(arena.size_bytes, max(arena.target_bytes, arena.taken_bytes))


def _num_workers(sessions: Sessions) -> dict[str, int]:
    modes = Counter(_mode(client) for client in sessions.clients.by_uuid.values() if client.is_attached)
    return {mode.value: modes[mode.value] for mode in (Mode.CUDA_IPC, Mode.SHARED_MEMORY)}


def _num_clients(sessions: Sessions) -> dict[str, int]:
    num_attached = sum(client.is_attached for client in sessions.clients.by_uuid.values())
    return {"attached": num_attached, "quarantined": len(sessions.clients.by_uuid) - num_attached}


def _models(sessions: Sessions) -> dict[str, int]:
    attached = (client for client in sessions.clients.by_uuid.values() if client.is_attached)
    return dict.fromkeys(sorted({client.peer.hello.model for client in attached} - {""})[:_MAX_MODELS], 1)


def _capacity_rows(arena: ArenaFile) -> int:
    return arena.target_rows if arena.geometry else 0


def slot_bytes(arena: Arena) -> int:
    """Return the bytes of a slot in all columns; 0 until the arena has a format."""
    return arena.geometry.slot_bytes * arena.geometry.num_columns if arena.geometry else 0


def _largest_tenants(counts: MemoryStats) -> dict[str, dict[str, int]]:
    """Return rows and bytes of the 32 largest tenants, by the start of their hashes, and of all others.

    They are no metrics: hashes change, and so the number of time series would grow without a bound."""
    largest, remaining = counts.tenants.largest()
    uses = {use.name.hex()[:16] or "none": use for use in largest} | {"other": remaining}
    return {
        "tenant_rows": {name: use.num_rows for name, use in uses.items()},
        "tenant_bytes": {name: use.num_bytes for name, use in uses.items()},
    }


def _hit_ratio(counts: Any) -> float:
    return round(counts.hits / (counts.hits + counts.misses), 4) if counts.hits + counts.misses else 0.0


# fmt: off
HIT_RATIO: Figure[Any] = Figure("hit_ratio", "hits / (hits + misses) since the start", _hit_ratio)

SESSIONS: tuple[Figure[Sessions], ...] = (
    Figure("num_clients", "Clients; quarantined: stream lost, death not proven", _num_clients, "state"),
    Figure("engine_info", "1 for each model that attached engines serve, at most 8 models", _models, "model"),
    Figure("num_previous_clients", "Clients of an earlier sidecar that may still use rows of the arena",
        lambda sessions: len(sessions.clients.previous)),
    Figure("num_document_marks", "Marks of documents that engines share, of all namespaces",
           lambda sessions: len(sessions.marks)),
    Figure("num_unwritten_rows", "Rows still to be checksummed or written through",
        lambda sessions: sessions.store.num_unwritten if sessions.store else 0),
    Figure("pending_work", "Background work left: rows, or for `report` requests whose times are unknown",
        lambda sessions: sessions.pending_work, "kind"),
)
TRANSFER: tuple[Figure[Sessions], ...] = (
    Figure("num_workers", "Attached workers, by the transfer mode of their stores", _num_workers, "mode"),
    Figure("num_slots_under_way", "Slots that a reader of a GPU may be writing to",
        lambda sessions: sessions.copier.num_slots_under_way),
    Figure("pinned_bytes", "Bytes of the memory tier that CUDA has pinned, by the process that copies",
        lambda sessions: {name: pins.pinned_bytes for name, pins in _pins_by_process(sessions).items()},
        "process"),
    Figure("num_pin_failures", "Parts of the memory tier that CUDA could not pin; their copies are slow",
        lambda sessions: {name: pins.num_failures for name, pins in _pins_by_process(sessions).items()},
        "process"),
)
TARGET: Figure[Resizer] = Figure(
    "target_bytes", "Bytes that the memory tier should have, including its slot table and index",
    lambda resizer: resizer.size.num_bytes)
ARENA: tuple[Figure[ArenaFile], ...] = (
    Figure("size_bytes", "Bytes that the tier takes at most now; equals the target after a resize",
        _size_bytes),
    Figure("max_bytes", "Bytes to which it can grow without a restart", lambda arena: arena.capacity_bytes),
    Figure("capacity_rows", "Rows (chunks of all ranks) that fit the target; with several KV groups slots, of"
        " which a row takes as many as its group needs", _capacity_rows),
    Figure("capacity_bytes", "Bytes of capacity_rows",
        lambda arena: _capacity_rows(arena) * slot_bytes(arena)),
    Figure("ready_rows", "Rows (or slots) whose memory is populated", lambda arena: arena.ready_rows),
)
MEMORY: tuple[Figure[MemoryTier], ...] = (
    Figure("usable_rows", "Rows (or slots) that may be reserved or leased",
        lambda memory: memory.usable_slots),
    Figure("usable_bytes", "Bytes of usable_rows",
        lambda memory: memory.usable_slots * slot_bytes(memory.arena)),
    Figure("used_rows", "Rows that are not free", lambda memory: memory.num_used),
    Figure("used_bytes", "Bytes of used_rows", lambda memory: memory.used_bytes),
    Figure("leased_rows", "Rows that a lease protects against eviction", lambda memory: memory.num_leased),
    Figure("quarantined_slots", "Slots whose reuse is not proven safe",
        lambda memory: memory.num_quarantined),
)
MEMORY_COUNTS: tuple[Figure[MemoryStats], ...] = (*declared(MemoryStats), HIT_RATIO)
REACHABLE: Figure[tuple[TierHandle, TierWorker | None]] = Figure(
    "is_reachable", "1 if the tier answers, as far as the sidecar knows", lambda lower: _is_reachable(*lower))
TRAFFIC: tuple[Figure[TierWorker], ...] = (
    Figure("load_bytes_per_second", "Speed of loads from the tier, measured in the last minute; 0: not known",
        lambda lower: round(lower.bytes_per_second)),
    Figure("num_queued_loads", "Rows that are being promoted, or wait for it", lambda lower: lower.num_loads),
    Figure("num_queued_writes", "Rows that wait to be written to the tier", lambda lower: lower.num_queued),
)
USED_BYTES: Figure[LowerTier] = Figure(
    "used_bytes", "Bytes in use on the tier's volume; for servers, all bytes that they hold",
    lambda tier: tier.used_bytes)
RESIDENCE: Figure[LowerTier] = Figure(
    "residence_seconds", "Estimated seconds until the tier evicts an object that is not used",
    lambda tier: tier.residence_seconds)
LOOKUPS: tuple[Figure[LookupSampler], ...] = (
    Figure("samples_dropped", "Samples dropped from the ring that /samples serves",
        lambda samples: samples.num_dropped, is_counter=True),
    Figure("chunk_tokens", "Tokens of a chunk", lambda samples: samples.chunk_tokens),
    Figure("row_bytes", "Bytes that a chunk takes in memory, of all KV groups and ranks on the node",
        lambda samples: samples.row_bytes),
    Figure("kv_bytes_per_token", "Bytes of a token's KV as stored, of all ranks on the node",
        lambda samples: samples.kv_bytes_per_token),
    Figure("engine_kv_bytes", "Bytes of the engines' own KV caches, of all ranks on the node",
        lambda samples: sum(client.peer.hello.kv_bytes for client in samples.followed())),
    Figure("gpus", "Workers of engines whose requests are counted: one for each GPU, or each process on CPUs",
        lambda samples: sum(client.peer.num_workers for client in samples.counted())),
    Figure("prefill_tokens_per_second", "Prompt tokens that the engines compute per second; 0: not known",
        lambda samples: round(sum(client.prefill_tokens_per_second for client in samples.counted()))),
)
# fmt: on


def collect(
    sessions: Sessions, handles: Mapping[str, TierHandle], counts: MemoryStats, resizer: Resizer
) -> list[StatsPart]:
    """Return the statistics of all parts of a sidecar. Takes time in proportion to the clients."""
    arena, store = sessions.arena, sessions.store
    facts = {
        "epoch": arena.epoch,
        "geometry": arena.geometry and asdict(arena.geometry),
        "attach_refusal": sessions.attach_refusal,
        "private_reason": sessions.clients.private_reason,
        "clients": list(map(_client, islice(sessions.clients.by_uuid.values(), MAX_LISTED_CLIENTS))),
    }
    causes = sessions.causes
    causes.settle()
    causes.benefit.hold(held_bytes(arena, handles), time.monotonic())
    branches: dict[str, Any] = {"branches": list(map(asdict, causes.branches.top(_NUM_BRANCHES)))}
    branches["uncached_reason"] = causes.uncached_reason
    lookup_facts = {name: getattr(sessions.samples, name) for name in ("namespace", "computes_on_cpu")}
    samples = read(declared(LookupStats), sessions.samples.stats) | read(LOOKUPS, sessions.samples)
    memory = read([TARGET], resizer) | read(ARENA, arena)
    memory |= read(MEMORY, store.memory if store else None) | read(MEMORY_COUNTS, counts)
    memory_facts: dict[str, Any] = {"path": str(arena.path), "growth_error": arena.growth_error}
    memory_facts |= {"resize_problem": resizer.problem, **_largest_tenants(counts)}
    return [
        StatsPart("", facts, read(SESSIONS, sessions)),
        StatsPart("lookups", lookup_facts, samples),
        StatsPart("causes", branches, read(declared(CauseStats), causes.stats), "lmcache"),
        StatsPart("benefit", _benefit_facts(causes), read(declared(BenefitStats), causes.benefit), "lmcache"),
        StatsPart(
            "transfer",
            transfer_facts(sessions) | {"pin_problem": pin_problem(sessions)},
            read(TRANSFER, sessions) | read(declared(CopyStats), sessions.copier.stats),
            "lmcache_transfer",
        ),
        StatsPart("memory", memory_facts, memory, "lmcache_memory_tier"),
        *(
            tier_part(name, lower, store.lower.get(name) if store else None)
            for name, lower in handles.items()
        ),
    ]


def tier_part(name: str, handle: TierHandle, worker: TierWorker | None) -> StatsPart:
    """Return the statistics of a lower tier. ``worker`` is None until the arena has a format."""
    figures = read([REACHABLE], (handle, worker))
    if handle.tier is not None:
        figures |= read([*declared(type(handle.tier.stats)), HIT_RATIO], handle.tier.stats)
        figures |= read(declared(TieredStats), handle.traffic) | read(TRAFFIC, worker)
        if handle.tier.used_bytes is not None:
            figures |= read([USED_BYTES], handle.tier)
        if handle.tier.residence_seconds < math.inf:
            figures |= read([RESIDENCE], handle.tier)
    health = handle.tier.health if handle.tier is not None else None
    reason = health.problem if health is not None and health.is_open else handle.off_reason
    if handle.keys is not None and (problem := handle.keys.cipher.problem):
        reason = problem  # the tier is off without a key
    address = str(handle.tier.address) if handle.tier else handle.address
    facts: dict[str, Any] = {"address": address, "off_reason": reason}
    if isinstance(handle.tier, RemoteTier | PeersTier):
        facts["servers"] = handle.tier.servers()
    if handle.servers_file is not None:
        facts["shards_problem"] = handle.servers_file.problem
    if handle.keys is not None:
        facts |= handle.keys.facts
    return StatsPart(name, facts, figures, "lmcache_tier", {"tier": name})


def _is_reachable(handle: TierHandle, worker: TierWorker | None) -> bool:
    if handle.tier is None or (handle.keys is not None and handle.keys.cipher.problem):
        return False
    return worker.is_healthy if worker else not handle.tier.health.is_open


def _client(client: Client) -> dict[str, Any]:
    hello = client.peer.hello
    names = ("column", "pid", "uid", "model")
    return {
        "uuid": hello.client_uuid.hex(),
        "engine": hello.engine_uuid.hex(),
        "role": pb.Role.Name(hello.role).removeprefix("ROLE_").lower(),
        "version": hello.client_version,
        "namespace": hello.namespace.hex(),
        "chunk_tokens": hello.geometry.chunk_tokens,
        "groups": list(map(str, client.peer.groups.values())),
        "transfer": {"mode": _mode(client), "reason": client.transfer.reason},
        "private_reason": client.private_reason,
        "epoch": client.epoch,
        "is_attached": client.is_attached,
        "prefill_tokens_per_second": client.prefill_tokens_per_second,
        "pins": client.pins and client.pins._asdict(),
    } | {name: getattr(hello, name) for name in names}
