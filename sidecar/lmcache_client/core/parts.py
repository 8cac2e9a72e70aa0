"""Messages of an engine whose ranks span several nodes, and the names of its rows. Pure.

The ranks on one node are a **part**. The sidecar of a part has complete rows of the part's columns, in a
namespace of the part. The scheduler is in part 0, and sends everything that the other parts need in the
messages of its steps. In each other part, one rank is the **speaker**: it calls the sidecar of its part.

An engine on one node sends the messages of ``jobs``, which have none of these fields.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lmcache_client.core.grid import Grid
from lmcache_client.core.hits import NamedRows, Rows
from lmcache_client.core.jobs import EngineIdentity, StepMeta, StoreJob, WorkerReport
from lmcache_client.off_notice import NOT_CACHED, OffNotice
from lmcache_store import keys
from lmcache_store.tiers.base import KEY_BYTES, ROW_KEY_BYTES, RowKey
from lmcache_store.tiers.memory.contracts import Slot

logger = logging.getLogger(__name__)

_INCOMPLETE = "%d of the engine's nodes have not started their cache, so nothing is cached: see their logs"

_OTHER_CHUNKS = (
    f"{NOT_CACHED}: node %d of the engine has %s, but node 0 has %s."
    " Give all nodes the same options, such as lmcache.chunk_tokens, and the same versions"
)

_OTHER_ENGINE = "it has other weights, options or versions than node 0, so make them equal"


class Hint(NamedTuple):
    """Keys of a request. The speaker answers which rows its part has, and its sidecar promotes others."""

    request_id: str
    number: int
    """Number of the hint, which its answer repeats."""
    namespace: bytes
    """Namespace of the keys, as part 0 has it."""
    chunk_keys: tuple[bytes, ...]
    """Keys of the chunks without the namespace, joined; per group with rows. Empty: the hint repeats the
    request's last hint."""
    first_chunk: int = 0
    """Number of the first of these chunks. Earlier hints of the request have the keys of earlier chunks. Each
    answer is about all chunks so far."""
    salt_hash: bytes = b""
    """``keys.salt_hash`` of the request's salt; empty: it has none."""
    tokens_per_second: float = 0.0
    """The engine's prefill rate; 0.0: unknown."""
    private_reason: str = ""
    """Why keys became private after the attach; empty: they did not."""
    num_handed_over: int = 0
    """Leading chunks that another engine has computed a moment ago, and may still be storing."""


class Lease(NamedTuple):
    """Protection of the rows of a hinted request from eviction."""

    request_id: str
    num_chunks: int
    """Leading chunks to protect."""


class End(NamedTuple):
    """End of a hinted request and of its lease. The speaker forgets the request."""

    request_id: str


Relay = Hint | Lease | End
"""A call of the scheduler side to the sidecars of the other parts. The order matters."""


class PartAnswer(NamedTuple):
    """Rows of a hinted request that a part has."""

    number: int
    """Number of the hint."""
    residency: tuple[bytes, ...]
    """Bits of the chunks whose rows are in memory (``numpy.packbits``); per group with rows. Empty: the
    request has ended."""
    num_expected: int
    """Leading chunks at whose end the request can resume, when all current promotions succeed."""
    is_probing: bool
    """True if the answer of the sidecar, or of a lower tier, is still outstanding."""


@dataclass
class PartedStep(StepMeta):
    """Message of a step to the workers of all parts."""

    relays: list[Relay] = field(default_factory=list)
    salts: dict[bytes, bytes] = field(default_factory=dict)
    """Tenant in the step's stores -> ``keys.salt_hash`` of its salt. Each part names tenants itself."""


@dataclass
class PartedReport(WorkerReport):
    """Report of a worker in an engine of several parts."""

    incomplete: set[int] = field(default_factory=set)
    """Ids of ended StoreJobs after which a part lacks some of the rows."""
    answers: dict[str, dict[int, PartAnswer]] = field(default_factory=dict)
    """Request id -> part -> its last answer."""

    def aggregate(self, other: WorkerReport) -> PartedReport:
        """Merge the reports of two ranks. A rank that does not know its part yet sends a ``WorkerReport``."""
        merged = super().aggregate(other)
        incomplete, answers = self.incomplete, self.answers
        if isinstance(other, PartedReport):
            incomplete = incomplete | other.incomplete
            names = answers.keys() | other.answers.keys()
            answers = {name: answers.get(name, {}) | other.answers.get(name, {}) for name in names}
        return PartedReport(**vars(merged), incomplete=incomplete, answers=answers)

    def __bool__(self) -> bool:
        return bool(self.incomplete or self.answers or super().__bool__())


@dataclass(frozen=True)
class PartedIdentity(EngineIdentity):
    """Identity of a rank in an engine of several parts. ``hello`` has the columns of the rank's part only."""

    part: int = 0
    num_parts: int = 2
    num_ranks: int = 2
    """Ranks of all parts."""
    is_speaker: bool = False
    """True for one rank of each part except part 0."""
    num_batches: int = 1
    """Largest number of steps that the engine runs at the same time."""
    identities: tuple[PartedIdentity, ...] = ()
    """Identities of other ranks in the same message."""
    conflict: str = ""
    """See ``EngineIdentity``."""

    def joined(self, other: EngineIdentity | None) -> PartedIdentity:
        """Return the identities of two ranks in one message."""
        if not isinstance(other, PartedIdentity):
            return self
        return replace(self, identities=(*self.identities, replace(other, identities=()), *other.identities))


@functools.lru_cache(64)
def part_namespace(namespace: bytes, part: int) -> bytes:
    """Return the namespace of the rows of one part. Part 0 has the engine's."""
    return keys.part_namespace(namespace, part) if part else namespace


def row_keys(namespace: bytes, chunk_keys: bytes) -> list[RowKey]:
    """Return the row keys of joined chunk keys."""
    starts = range(0, len(chunk_keys), KEY_BYTES)
    return [namespace + chunk_keys[start : start + KEY_BYTES] for start in starts]


class PartNames:
    """Names of the rows and tenants of a part, given those of part 0."""

    def __init__(self, identity: PartedIdentity) -> None:
        self._part, self._namespace = identity.part, identity.hello.namespace

    def is_shared(self, namespace: bytes) -> bool:
        """Return True if the part's namespace is that of its client, so that the sidecar may share the rows.

        The namespaces differ if the engine was reset, if the parts have different weights, or if a part
        cannot identify its weights.
        """
        return part_namespace(namespace, self._part) == self._namespace

    def namespace(self, namespace: bytes) -> bytes:
        """Return the part's namespace.

        A namespace that is not shared depends on the weights of the part. Rows stay in the arena, and an
        engine with other weights must not find them.
        """
        suffix = b"" if self.is_shared(namespace) else self._namespace
        return part_namespace(namespace + suffix, self._part)

    def tenant(self, tenant: bytes, salt_hash: bytes) -> bytes:
        """Return the tenant in the part; without a ``salt_hash``, that of part 0."""
        return keys.tenant_of_hash(salt_hash, self._namespace) if salt_hash else tenant

    def store(self, job: StoreJob, salts: Mapping[bytes, bytes]) -> StoreJob:
        """Return the job with the part's names. ``salts``: see ``PartedStep``."""
        groups = tuple(group._replace(keys=self._row_keys(group.keys)) for group in job.groups)
        return replace(job, groups=groups, tenant=self.tenant(job.tenant, salts.get(job.tenant, b"")))

    def find(self, find_few: Callable[[list[RowKey]], list[Slot]], rows: Rows) -> list[Slot]:
        """Find these rows in the part's arena, up to the first one that is missing."""
        if not isinstance(rows, NamedRows):
            return []
        return find_few(row_keys(self.namespace(rows.namespace), rows.chunk_keys))

    def _row_keys(self, joined: bytes) -> bytes:
        namespace, starts = self.namespace(joined[:KEY_BYTES]), range(KEY_BYTES, len(joined), ROW_KEY_BYTES)
        return b"".join(namespace + joined[start : start + KEY_BYTES] for start in starts)


class Introductions:
    """Identities of the parts of an engine, whose ranks attach at different times.

    Nothing is cached before all parts are known, because the KV of each rank depends on the weights of all
    ranks. If one part has other weights, no engine must find the KV under the name of part 0's weights. If a
    part has other chunks, the keys of part 0 do not fit its chunks, so nothing is cached.
    """

    def __init__(self) -> None:
        self._parts: dict[int, PartedIdentity] = {}

    def take(self, messages: Iterable[Any]) -> Iterator[EngineIdentity]:
        """Yield the engine's identity when it is known. Ignores messages of other connectors."""
        num_missing = 0
        for message in messages:
            if isinstance(message, PartedIdentity):
                was_known = len(self._parts) == message.num_parts
                self._parts |= {identity.part: identity for identity in (message, *message.identities)}
                is_known = len(self._parts) == message.num_parts
                if is_known and not was_known and self._has_equal_chunks():
                    if conflict := self._conflict():
                        logger.warning("Cached KV stays private to this engine: %s", conflict)
                    yield replace(self._parts[0], identities=(), conflict=conflict)
                num_missing = message.num_parts - len(self._parts)
            elif isinstance(message, EngineIdentity):
                yield message
        if num_missing:
            logger.info(_INCOMPLETE, num_missing)

    def _has_equal_chunks(self) -> bool:
        """Return True if all parts have chunks of one size. Otherwise, log a warning."""
        first = self._parts[0].grid
        for part, identity in sorted(self._parts.items()):
            if identity.grid != first:
                OffNotice().warn(_OTHER_CHUNKS % (part, _sizes(identity.grid), _sizes(first)))
                return False
        return True

    def _conflict(self) -> str:
        first = self._parts[0].hello
        for part, identity in sorted(self._parts.items()):
            if part and not PartNames(identity).is_shared(first.namespace):
                if first.private_reason:
                    return f"node 0 of the engine: {first.private_reason}"
                return f"node {part} of the engine: {identity.hello.private_reason or _OTHER_ENGINE}"
        return ""


def _sizes(grid: Grid) -> str:
    num_bytes = sum(group.chunk_bytes for group in grid.groups)
    return f"chunks of {grid.chunk_tokens} tokens and {num_bytes} bytes (KV groups: {len(grid.groups)})"
