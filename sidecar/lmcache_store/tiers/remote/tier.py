"""The remote tier: objects in Redis or Valkey servers that many pods share.

``objects.py`` describes rows, ``topology.py`` and ``cluster.py`` servers, and ``address.py`` URLs.

**Trust.** Loaded bytes are compared with the request. A mismatch is a miss, counted by reason. The tier only
writes names that start with its prefix. It deletes two things: a value of another type under such a name, and
a row of which the server evicted a part while it was written.

**Encryption.** With a cipher, all values are encrypted, and plain rows are not read. If the key version of a
row is absent, the row is a miss. It stays in Redis until a store replaces it, or Redis evicts it.

**Outages.** A fault of a server opens its circuit. The tier then sends it no requests until a probe succeeds.
While another server is healthy, rows of the unhealthy server are misses, and stores of them are refused. When
all servers are unhealthy, operations raise TierUnavailableError.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.base import Loaded, ObjectId, RowKey
from lmcache_store.tiers.circuit import JointHealth
from lmcache_store.tiers.encryption.pieces import Cipher
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError, ServerError, TierUnavailableError
from lmcache_store.tiers.remote import marks, objects
from lmcache_store.tiers.remote.address import Address, AddressKind, Endpoint, Tls
from lmcache_store.tiers.remote.cluster import RedisCluster
from lmcache_store.tiers.remote.resp import Reply, RespConnection
from lmcache_store.tiers.remote.server import RedisServer
from lmcache_store.tiers.remote.topology import SentinelMaster, ShardList, ShardsTopology, Topology
from lmcache_store.tiers.remote.usage import QUESTIONS, Usage
from lmcache_store.tiers.remote.value_formats import PLAIN, EncryptedValues
from lmcache_store.tiers.stats import ObjectStats, count_reason

T = TypeVar("T")

_MAX_NAMES = 8192  # names in one round trip of ``touch``
_MAX_TRIES = 3  # servers to try for one object
_MAX_REWRITE = 4096  # number of invalid objects to remember


class RemoteTier:
    """Thread-safe. Every method except ``close`` and ``set_shards`` may block up to the deadline.

    ``timeout_seconds`` is the deadline of one step: a connection, a window of a probe, or some pieces.
    ``present`` returns the address with the current user name and password, which may change at run time. It
    is called for every new connection, and may raise OSError. Default: ``address``. It must raise OSError
    while ``cipher`` has no key. Without a cipher, rows are not encrypted.
    """

    takes_writes = True
    is_local = False

    def __init__(
        self,
        address: Address,
        *,
        timeout_seconds: float = 1.0,
        present: Callable[[], Address] | None = None,
        cipher: Cipher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.is_encrypted = cipher is not None
        self.stats = ObjectStats()
        self.residence_seconds = math.inf
        self._clock = clock
        self._usages: dict[RedisServer, Usage] = {}  # latest usage of servers that report it
        self._timeout = timeout_seconds
        self._present = present or (lambda: address)
        self._format = EncryptedValues(cipher) if cipher else PLAIN
        self.health = JointHealth(lambda: [server.circuit for server in self._topology.servers()])
        self.health.subscribe(self._note)
        self._secure: dict[Endpoint, Tls] = {}  # shards that use TLS according to the list
        self._topology = self._make_topology()
        self._thread = threading.local()  # ``stored``: columns of the row that this thread stored last
        self._lock = threading.Lock()  # protects stats and the following
        self._rewrite: Recent[ObjectId, None] = Recent(_MAX_REWRITE)  # present but not readable

    def set_shards(self, shards: ShardList) -> None:
        """Switch to another list of shards. Raises ValueError if the URL is not of shards."""
        if not isinstance(self._topology, ShardsTopology):
            raise ValueError(f"remote tier {self.address} has no list of shards")
        self._secure = dict.fromkeys(shards.secure, Tls(ca=shards.ca))
        self._topology.change(shards)
        self.address = replace(self.address, endpoints=shards.current)
        self.health.notify(False)

    @property
    def used_bytes(self) -> int | None:
        """Memory that all values use on the servers, including those of other clients; see LowerTier."""
        usages = self._usages.values()
        return sum(usage.used_bytes for usage in usages) if usages else None

    def servers(self) -> list[dict[str, Any]]:
        """Return the state of each server as plain data, for people. Servers that ``check`` could not ask
        lack the figures."""
        states = []
        for server in self._topology.servers():
            state: dict[str, Any] = {"name": server.name, "problem": server.circuit.problem}
            if usage := self._usages.get(server):
                state |= {"policy": usage.policy, "answer_seconds": round(usage.answer_seconds, 4)}
                state |= {"used_bytes": usage.used_bytes, "max_bytes": usage.max_bytes}
            states.append(state)
        return states

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether it is stored.

        Takes one pipelined round trip per server, and another one for absent objects that another server may
        hold. An object whose slot a cluster is migrating (ASK) counts as absent."""
        present = [False] * len(ids)
        candidates = [self._candidates(object_id) for object_id in ids]
        while True:
            asked: dict[RedisServer, list[int]] = defaultdict(list)
            for index, servers in enumerate(candidates):
                server = None if present[index] else next(servers, None)
                if server is not None:
                    asked[server].append(index)
            if not asked:
                return present
            for server, indices in asked.items():
                replies = self._call_all(server, [self._ask_for(ids[index]) for index in indices])
                for index, reply in zip(indices, replies, strict=False):
                    present[index] = reply == 1

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read one column of a row into ``into``. None: a miss; the contents are then undefined."""
        loaded = None
        for server in self._candidates(object_id):
            try:
                loaded = self._run(server, lambda c: objects.load(c, object_id, into, length, self._format))
            except InvalidObjectError as invalid:
                self._note_invalid(object_id, str(invalid))
                return None
            except KeyAbsentError:
                self._note_key_absent(object_id)
                return None
            except ServerError as error:
                if not self._topology.learn(error, server):
                    self._note_invalid(object_id, error.code)
                    return None
            if loaded is not None:
                is_owner = server in self._owners(object_id)[:1]
                loaded = loaded._replace(is_misplaced=not is_owner)
                break
        with self._lock:
            self.stats.hits += loaded is not None
            self.stats.misses += loaded is None
        return loaded

    def rate_of(self, keys: Sequence[RowKey]) -> float | None:
        """See LowerTier."""
        return None

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Write one column of a row, or mark a stored one as recently used.

        Returns False if the server refused it (for example because it is full), or is unavailable while other
        servers are healthy."""
        earlier = self._earlier_columns(object_id)
        is_new, reason = None, "unavailable"

        def write(connection: RespConnection, is_rewrite: bool) -> bool:
            return objects.store(
                connection,
                object_id,
                payload,
                label,
                earlier=earlier,
                is_rewrite=is_rewrite,
                form=self._format,
            )

        for server in self._candidates(object_id):
            try:
                is_new = self._write(server, object_id, write)
            except ServerError as error:
                if self._topology.learn(error, server):
                    continue
                reason = error.code
            break
        with self._lock:
            if is_new is None:
                count_reason(self.stats.refused, reason)
                return False
            self.stats.stored += is_new
            self.stats.touched += not is_new
            self._rewrite.pop(object_id, None)
        self._thread.stored = [*earlier, object_id]
        return True

    def _write(
        self, server: RedisServer, object_id: ObjectId, write: Callable[[RespConnection, bool], bool]
    ) -> bool | None:
        """Call ``write`` on a connection, as a rewrite if the stored column is invalid. See ``_run``."""
        is_rewrite = object_id in self._rewrite
        try:
            return self._run(server, lambda connection: write(connection, is_rewrite))
        except InvalidObjectError:  # this says nothing about the server's health
            with self._lock:
                self._rewrite[object_id] = None
            return self._run(server, lambda connection: write(connection, True))

    def _earlier_columns(self, object_id: ObjectId) -> list[ObjectId]:
        """Return the columns before this one that this thread has just stored for the same row.

        The server may evict the row between two columns. Then it would keep the later columns alone.
        """
        stored: list[ObjectId] = getattr(self._thread, "stored", [])
        return [
            column
            for column in stored
            if column.row_key == object_id.row_key and column.column < object_id.column
        ]

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        """Mark rows that were hit in a higher tier as recently used. Returns rows of which the owner lacks a
        column."""
        asked: dict[RedisServer, list[tuple[ObjectId, bool]]] = defaultdict(list)  # object, is owner?
        for key in keys:
            for column in range(num_columns):
                object_id = ObjectId(key, column)
                for position, server in enumerate(self._owners(object_id)):
                    asked[server].append((object_id, position == 0))
        absent: set[RowKey] = set()
        for server, questions in asked.items():
            for start in range(0, len(questions), _MAX_NAMES):
                batch = questions[start : start + _MAX_NAMES]
                replies = self._call_all(server, [self._ask_for(object_id) for object_id, _ in batch])
                absent |= {
                    object_id.row_key
                    for (object_id, is_owner), reply in zip(batch, replies, strict=False)
                    if is_owner and reply == 0
                }
        return absent

    def exchange_marks(
        self, namespace: bytes, added: bytes, now: int, capacity: int, query: marks.MarksQuery
    ) -> bytes:
        """Add marks of documents and read marks, packed 64-bit numbers; see ``marks.exchange``.

        Raises TierError."""
        name = marks.set_name(self.address.prefix, namespace, self._format)
        members = self._format.pack_marks(namespace, added)
        for server in self._candidates(ObjectId(marks.row_key_of(namespace), 0)):
            try:
                read = self._run(server, lambda c: marks.exchange(c, name, members, now, capacity, query))
            except ServerError as error:
                if self._topology.learn(error, server):
                    continue
                raise
            if read is not None:
                return self._format.parse_marks(namespace, read)
            break
        raise TierUnavailableError(f"remote tier {self.address}: the server of {name} is unavailable")

    def check(self) -> None:
        """See LowerTier. A server that does not answer is logged, and its circuit opens."""
        self._topology.refresh()
        usages, residence = {}, math.inf
        for server in self._topology.servers():
            with contextlib.suppress(TierUnavailableError, ServerError):
                replies, seconds = server.run(_ask_usage)
                usage = Usage.parse(replies, self._clock(), seconds)
                if usage is not None:
                    before, usages[server] = self._usages.get(server, usage), usage
                    residence = min(residence, usage.residence_seconds(before))
                    with self._lock:
                        self.stats.evicted += max(0, usage.num_evicted - before.num_evicted)
        self._usages, self.residence_seconds = usages, residence

    def close(self) -> None:
        """Close all connections. The threads that used them must have ended."""
        self._topology.close()

    def _call_all(self, server: RedisServer, commands: Sequence[Sequence[str]]) -> list[Reply | ServerError]:
        """Send commands in one round trip. Returns no replies if the server is unavailable."""
        replies = self._run(server, lambda connection: connection.call_all(commands)) or []
        for reply in replies:
            if isinstance(reply, ServerError):
                self._topology.learn(reply, server)
        return replies

    def _owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """See ``Topology.owners``. Servers are chosen by the name that the row has in Redis."""
        stored_key = self._format.stored_key(object_id.row_key)
        return self._topology.owners(ObjectId(stored_key, object_id.column))

    def _candidates(self, object_id: ObjectId) -> Iterator[RedisServer]:
        """Yield the servers that may hold an object, the likeliest first.

        Reads the topology again each time, because replies may have changed it."""
        tried: list[RedisServer] = []
        while len(tried) < _MAX_TRIES:
            owners = self._owners(object_id)
            if not owners and self.health.is_open:
                raise TierUnavailableError(f"remote tier {self.address} is unavailable")
            server = next((owner for owner in owners if owner not in tried), None)
            if server is None:
                return
            tried.append(server)
            yield server

    def _run(self, server: RedisServer, operation: Callable[[RespConnection], T]) -> T | None:
        """Run an operation. Returns None if this server is unhealthy while another one is healthy."""
        try:
            return server.run(operation)
        except TierUnavailableError:
            if self.health.is_open:
                raise
            return None

    def _ask_for(self, object_id: ObjectId) -> tuple[str, ...]:
        """Return the command that checks for a column. For Redis, it counts as a use of the row."""
        name = objects.row_name(self.address.prefix, object_id.row_key, self._format)
        return ("HEXISTS", name, objects.marker_field(object_id))

    def _note_invalid(self, object_id: ObjectId, reason: str) -> None:
        with self._lock:
            self.stats.note_invalid(object_id.row_key, reason)
            self._rewrite[object_id] = None

    def _note_key_absent(self, object_id: ObjectId) -> None:
        with self._lock:
            self.stats.key_absent += 1
            self.stats.misses += 1
            self._rewrite[object_id] = None

    def _note(self, failed: bool) -> None:
        with self._lock:
            self.stats.failures += failed

    def _make_topology(self) -> Topology:
        def connect(endpoint: Endpoint, address: Address | None = None) -> RespConnection:
            return RespConnection(endpoint, address or self._present(), self._timeout)

        def connect_to_shard(endpoint: Endpoint) -> RespConnection:
            present = self._present()
            return connect(endpoint, replace(present, tls=present.tls or self._secure.get(endpoint)))

        def make_server(endpoint: Endpoint) -> RedisServer:
            return RedisServer(str(endpoint), lambda: connect_to_shard(endpoint), self.health.notify)

        if self.address.kind is AddressKind.SENTINEL:
            return SentinelMaster(self.address, self._present, connect, self.health.notify)
        if self.address.kind is AddressKind.CLUSTER:
            return RedisCluster(self.address.endpoints, connect, self.health.notify)
        return ShardsTopology(ShardList(self.address.endpoints), make_server)


def _ask_usage(connection: RespConnection) -> tuple[list[Reply | ServerError], float]:
    """Return the replies to ``QUESTIONS``, and the seconds that they took on an open connection."""
    began = time.monotonic()
    replies = connection.call_all(QUESTIONS)
    if isinstance(replies[0], ServerError):
        raise replies[0]
    return replies, time.monotonic() - began
