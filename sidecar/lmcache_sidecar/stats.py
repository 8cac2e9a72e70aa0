"""What the sidecar says of itself: facts, which are for people, and figures, which are metrics, too.

A figure is declared once, with its name and what it means: gauges here, counters where they are counted
(``lmcache.tiers.stats``). ``/stats``, ``/metrics`` and the guide's table walk these declarations.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from operator import attrgetter
from typing import Any, Generic, TypeVar

import grpc

from lmcache.cuda.pin_status import PinStatus
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.base import LowerTier
from lmcache.tiers.memory.arena import ArenaFile
from lmcache.tiers.memory.contracts import Arena
from lmcache.tiers.memory.tier import MemoryTier
from lmcache.tiers.stats import MemoryStats, TieredStats
from lmcache.tiers.tiered.tier_worker import TierWorker
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.copiers.copier import Mode
from lmcache_sidecar.copiers.jobs import CopyStats
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.samples import LookupStats, Samples
from lmcache_sidecar.sessions import Sessions
from lmcache_sidecar.tiers import TierHandle

T = TypeVar("T")

_BOUNDS_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class CallStats:
    """The engine's calls by method. Plain numbers: a call must not pay for its statistics."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.ended: Counter[tuple[str, str]] = Counter()  # (method, name of the gRPC status)
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_SECONDS) + 1))

    def observe(self, method: str, seconds: float) -> None:
        """A call was answered."""
        self._buckets[method][bisect_left(_BOUNDS_SECONDS, seconds)] += 1
        self.seconds[method] += seconds

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """A call ended."""
        self.ended[method, code.name] += 1

    def buckets(self, method: str) -> list[tuple[str, int]]:
        """Upper bounds in seconds, and how many calls took no longer."""
        bounds = [*map(str, _BOUNDS_SECONDS), "+Inf"]
        return list(zip(bounds, accumulate(self._buckets[method]), strict=True))


@dataclass(frozen=True)
class Figure(Generic[T]):
    """The declaration of a number, or of one for each value of ``label``."""

    name: str
    about: str
    read: Callable[[T], Any]
    label: str = ""
    is_counter: bool = False

    @property
    def metric(self) -> str:
        """Its name in Prometheus, after that of its part."""
        return re.sub("^(num|is)_", "", self.name) + ("_total" if self.is_counter else "")


@dataclass(frozen=True)
class Part:
    """What one part of the sidecar says of itself; figures of what is not there (yet) are left out."""

    name: str
    """Its key in ``/stats``; empty: the sidecar itself, whose keys stand beside the parts."""

    facts: Mapping[str, Any]
    """For people; they are no metrics."""

    figures: Mapping[Figure[Any], Any]
    """With their values; those by label are mappings."""

    prefix: str = "lmcache"
    """Of the metrics' names."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Of all its metrics."""


def read(figures: Iterable[Figure[T]], source: T | None) -> dict[Figure[Any], Any]:
    """Return the figures' values now; none where there is no source."""
    return {} if source is None else {figure: _plain(figure.read(source)) for figure in figures}


def document(parts: Iterable[Part]) -> dict[str, Any]:
    """Return all of it as plain numbers and text, by name."""
    found: dict[str, Any] = {}
    for part in parts:
        values = {**part.facts, **{figure.name: value for figure, value in part.figures.items()}}
        found |= {part.name: values} if part.name else values
    return found


def declared(kind: type[Any]) -> tuple[Figure[Any], ...]:
    """Return the counters that a dataclass declares."""
    return tuple(
        Figure(count.name, read=attrgetter(count.name), is_counter=True, **count.metadata)
        for count in fields(kind)
        if "about" in count.metadata
    )


def _plain(value: Any) -> Any:
    """Text in place of members of an enumeration, which label some counters."""
    if not isinstance(value, dict):
        return value
    present = dict(value)  # at once: threads count on
    return {getattr(key, "value", key): number for key, number in present.items()}


def _mode(client: Client) -> str:
    """How what it stores gets into the arena; empty for a scheduler, which stores nothing."""
    mode = Mode.CUDA_IPC if client.transfer.is_ipc else Mode.SHARED_MEMORY
    return mode.value if client.peer.is_worker else ""


def transfer_facts(sessions: Sessions) -> dict[str, str]:
    """Return what was asked for, and what all attached workers together have: the worst of it."""
    workers = [one for one in sessions.clients.by_uuid.values() if one.is_attached and one.peer.is_worker]
    facts = {"asked": sessions.copier.mode.value, "mode": "", "reason": "no engine is attached"}
    for worker in sorted(workers, key=lambda worker: worker.transfer.is_ipc)[:1]:
        facts |= {"mode": _mode(worker), "reason": worker.transfer.reason}
    return facts


def _engine_pins(sessions: Sessions) -> list[tuple[str, PinStatus]]:
    """What each attached worker has pinned, with a name for people."""
    clients = [client for client in sessions.clients.by_uuid.values() if client.is_attached]
    return [(f"{client.name},", client.pins) for client in clients if client.pins is not None]


def _reader_pins(sessions: Sessions) -> list[tuple[str, PinStatus]]:
    return [(f"the reader of {uuid}", pins) for uuid, pins in sessions.copier.pins.items()]


def _pins_by_process(sessions: Sessions) -> dict[str, PinStatus]:
    named = {"engine": _engine_pins(sessions), "reader": _reader_pins(sessions)}
    return {process: PinStatus.total(pins for _, pins in found) for process, found in named.items()}


def pin_problem(sessions: Sessions) -> str:
    """Say which process could not pin memory, and why; empty: none failed. The first one stands for all."""
    for name, pins in (*_engine_pins(sessions), *_reader_pins(sessions)):
        if pins.num_failures:
            return f"{name} could not pin {pins.num_failures} parts of the memory tier: {pins.problem}"
    return ""


def _num_workers(sessions: Sessions) -> dict[str, int]:
    modes = Counter(_mode(client) for client in sessions.clients.by_uuid.values() if client.is_attached)
    return {mode.value: modes[mode.value] for mode in (Mode.CUDA_IPC, Mode.SHARED_MEMORY)}


def _num_clients(sessions: Sessions) -> dict[str, int]:
    num_attached = sum(client.is_attached for client in sessions.clients.by_uuid.values())
    return {"attached": num_attached, "quarantined": len(sessions.clients.by_uuid) - num_attached}


def _capacity_rows(arena: ArenaFile) -> int:
    return arena.target_rows if arena.geometry else 0


def _row_bytes(arena: Arena) -> int:
    return arena.geometry.slot_bytes * arena.geometry.num_columns if arena.geometry else 0


def _tenants(counts: MemoryStats, number: str) -> dict[str, int]:
    largest, others = counts.tenants.largest()
    uses = {use.name.hex()[:16] or "none": use for use in largest} | {"other": others}
    return {name: getattr(use, number) for name, use in uses.items()}


def _hit_ratio(counts: Any) -> float:
    return round(counts.hits / (counts.hits + counts.misses), 4) if counts.hits + counts.misses else 0.0


# fmt: off
HIT_RATIO: Figure[Any] = Figure("hit_ratio", "hits / (hits + misses) since the start", _hit_ratio)

SESSIONS: tuple[Figure[Sessions], ...] = (
    Figure("num_clients", "Clients; quarantined: stream lost, death not proven", _num_clients, "state"),
    Figure("num_previous_clients", "Clients of an earlier sidecar that may still use rows of the arena",
        lambda sessions: len(sessions.clients.previous)),
    Figure("num_unwritten_rows", "Rows still to be checksummed or written through",
        lambda sessions: sessions.store.num_unwritten if sessions.store else 0),
)
TRANSFER: tuple[Figure[Sessions], ...] = (
    Figure("num_workers", "Attached workers by how what they store gets into memory", _num_workers, "mode"),
    Figure("num_slots_under_way", "Slots that a reader of a GPU may be writing to",
        lambda sessions: sessions.copier.num_slots_under_way),
    Figure("pinned_bytes", "Bytes of the memory tier that CUDA has pinned, by the process that copies",
        lambda sessions: {name: pins.pinned_bytes for name, pins in _pins_by_process(sessions).items()},
        "process"),
    Figure("num_pin_failures", "Parts of the memory tier that CUDA could not pin: their copies are slow",
        lambda sessions: {name: pins.num_failures for name, pins in _pins_by_process(sessions).items()},
        "process"),
)
TARGET: Figure[Resizer] = Figure(
    "target_bytes", "Bytes that the memory tier is to have, of which slot table and index take some",
    lambda resizer: resizer.target_bytes)
ARENA: tuple[Figure[ArenaFile], ...] = (
    Figure("size_bytes", "Bytes that it takes at most now: the target when that, and nothing else, is there",
        lambda arena: min(arena.size_bytes, max(arena.target_bytes, arena.taken_bytes))),
    Figure("max_bytes", "Bytes to which it can grow without a restart", lambda arena: arena.capacity_bytes),
    Figure("capacity_rows", "Rows (chunks of all ranks) when all of the target is populated; with several KV"
        " groups slots, of which a row takes as many as its group needs", _capacity_rows),
    Figure("capacity_bytes", "Bytes of these rows", lambda arena: _capacity_rows(arena) * _row_bytes(arena)),
    Figure("ready_rows", "Rows (or slots) whose memory is populated", lambda arena: arena.ready_rows),
    Figure("ready_bytes", "Bytes of these rows", lambda arena: arena.ready_rows * _row_bytes(arena)),
)
MEMORY: tuple[Figure[MemoryTier], ...] = (
    Figure("usable_rows", "Rows (or slots, as above) that may be given out or leased",
        lambda memory: memory.usable_slots),
    Figure("usable_bytes", "Bytes of these rows",
        lambda memory: memory.usable_slots * _row_bytes(memory.arena)),
    Figure("used_rows", "Rows in use", lambda memory: memory.num_used),
    Figure("used_bytes", "Bytes of these rows",
        lambda memory: memory.used_bytes),
    Figure("leased_rows", "Rows under a lease", lambda memory: memory.num_leased),
    Figure("quarantined_slots", "Slots whose reuse is not proven safe",
        lambda memory: memory.num_quarantined),
)
MEMORY_COUNTS: tuple[Figure[MemoryStats], ...] = (
    *declared(MemoryStats),
    HIT_RATIO,
    Figure("tenant_rows", "Rows of the 32 largest tenants, by the head of their hashes, and of all others",
        lambda counts: _tenants(counts, "num_rows"), "tenant"),
    Figure("tenant_bytes", "Bytes of these rows", lambda counts: _tenants(counts, "num_bytes"), "tenant"),
)
REACHABLE: Figure[tuple[TierHandle, TierWorker | None]] = Figure(
    "is_reachable", "1 if the tier answers, as far as known", lambda lower: _is_reachable(*lower))
TRAFFIC: tuple[Figure[TierWorker], ...] = (
    Figure("load_bytes_per_second", "How fast it loads, as measured in the last minute; 0: not known",
        lambda lower: round(lower.bytes_per_second)),
    Figure("num_queued_loads", "Rows being brought, or waiting for it", lambda lower: lower.num_loads),
    Figure("num_queued_writes", "Rows that wait for their write", lambda lower: lower.num_queued),
)
USED_BYTES: Figure[LowerTier] = Figure(
    "used_bytes", "Bytes that the tier takes of its volume; of servers, all that they hold",
    lambda tier: tier.used_bytes)
RESIDENCE: Figure[LowerTier] = Figure(
    "residence_seconds", "How long an object stays that nobody uses, as things go",
    lambda tier: tier.residence_seconds)
LOOKUPS: tuple[Figure[Samples], ...] = (
    Figure("samples_dropped", "Samples that left the ring behind /samples",
        lambda samples: samples.num_dropped, is_counter=True),
    Figure("chunk_tokens", "Tokens of a chunk", lambda samples: samples.chunk_tokens),
    Figure("row_bytes", "Bytes that a chunk takes in memory, of all ranks and KV groups",
        lambda samples: samples.row_bytes),
    Figure("kv_bytes_per_token", "Bytes of a token's KV as stored, of all ranks",
        lambda samples: samples.kv_bytes_per_token),
    Figure("engine_kv_bytes", "Bytes of the engines' own KV caches, of all ranks",
        lambda samples: sum(one.peer.hello.kv_bytes for one in samples.followed())),
    Figure("gpus", "Attached workers, each of which has a GPU",
        lambda samples: sum(one.peer.is_worker for one in samples.followed())),
    Figure("prefill_tokens_per_second", "Tokens of prompts that the engines compute per second; 0: not known",
        lambda samples: round(sum(one.prefill_tokens_per_second for one in samples.followed()))),
)
# fmt: on


def collect(
    sessions: Sessions, handles: Mapping[str, TierHandle], counts: MemoryStats, resizer: Resizer
) -> list[Part]:
    """Return what is known about the parts of a sidecar. Costs O(clients)."""
    arena, store = sessions.arena, sessions.store
    facts = {
        "epoch": arena.epoch,
        "geometry": arena.geometry and asdict(arena.geometry),
        "clients": [_client(client) for client in sessions.clients.by_uuid.values()],
    }
    samples = read(declared(LookupStats), sessions.samples.stats) | read(LOOKUPS, sessions.samples)
    memory = read([TARGET], resizer) | read(ARENA, arena)
    memory |= read(MEMORY, store.memory if store else None) | read(MEMORY_COUNTS, counts)
    memory_facts = {"path": str(arena.path), "growth_error": arena.growth_error}
    memory_facts["resize_problem"] = resizer.problem
    return [
        Part("", facts, read(SESSIONS, sessions)),
        Part("lookups", {"namespace": sessions.samples.namespace}, samples),
        Part(
            "transfer",
            transfer_facts(sessions) | {"pin_problem": pin_problem(sessions)},
            read(TRANSFER, sessions) | read(declared(CopyStats), sessions.copier.stats),
            "lmcache_transfer",
        ),
        Part("memory", memory_facts, memory, "lmcache_memory_tier"),
        *(
            tier_part(name, lower, store.lower.get(name) if store else None)
            for name, lower in handles.items()
        ),
    ]


def tier_part(name: str, handle: TierHandle, worker: TierWorker | None) -> Part:
    """Return what a lower tier did, and whether it answers; there is no worker before the arena's format."""
    figures = read([REACHABLE], (handle, worker))
    if handle.tier is not None:
        figures |= read([*declared(type(handle.tier.stats)), HIT_RATIO], handle.tier.stats)
        figures |= read(declared(TieredStats), handle.traffic) | read(TRAFFIC, worker)
        if handle.tier.used_bytes is not None:
            figures |= read([USED_BYTES], handle.tier)
        if handle.tier.residence_seconds < math.inf:
            figures |= read([RESIDENCE], handle.tier)
    health = handle.tier.health if handle.tier is not None else None
    why = health.problem if health is not None and health.is_open else handle.off_reason
    facts = {"address": str(handle.tier.address) if handle.tier else handle.address, "off_reason": why}
    if handle.shards is not None:
        facts["shards_problem"] = handle.shards.problem
    return Part(name, facts, figures, "lmcache_tier", {"tier": name})


def _is_reachable(handle: TierHandle, worker: TierWorker | None) -> bool:
    if handle.tier is None:
        return False
    return worker.is_healthy if worker else not handle.tier.health.is_open


def _client(client: Client) -> dict[str, Any]:
    hello = client.peer.hello
    names = ("column", "pid", "uid", "model", "private_reason")
    return {
        "uuid": hello.client_uuid.hex(),
        "engine": hello.engine_uuid.hex(),
        "role": pb.Role.Name(hello.role).removeprefix("ROLE_").lower(),
        "version": hello.client_version,
        "namespace": hello.namespace.hex(),
        "chunk_tokens": hello.geometry.chunk_tokens,
        "groups": list(map(str, client.peer.groups.values())),
        "transfer": {"mode": _mode(client), "reason": client.transfer.reason},
        "epoch": client.epoch,
        "is_attached": client.is_attached,
        "prefill_tokens_per_second": client.prefill_tokens_per_second,
        "pins": client.pins and client.pins._asdict(),
    } | {name: getattr(hello, name) for name in names}
