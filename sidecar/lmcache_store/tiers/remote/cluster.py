"""Redis Cluster: which server owns which of the 16384 hash slots.

The client requests the slot map at the start, when a server fails, and when a server replies that a slot
moved. It accepts the map of any server. It requests the map at most once a second. When a single slot moved,
the reply itself names the new owner.
"""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache_store.tiers.base import Listener, ObjectId
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.remote.address import Endpoint
from lmcache_store.tiers.remote.objects import hash_tag
from lmcache_store.tiers.remote.resp import Reply, RespConnection
from lmcache_store.tiers.remote.server import RedisServer
from lmcache_store.tiers.remote.topology import Topology, endpoint_of

T = TypeVar("T")

_NUM_SLOTS = 1 << 14
_REFRESH_SECONDS = 1.0

SlotMap = list[Endpoint | None]


class ClusterNode(RedisServer):
    """A server of a cluster. If it replies ASK for a migrating slot, the operation runs on the target."""

    non_fatal_errors = RedisServer.non_fatal_errors | {"ASK", "MOVED"}

    def __init__(self, endpoint: Endpoint, cluster: RedisCluster) -> None:
        super().__init__(str(endpoint), lambda: cluster.connect(endpoint), cluster.listener)
        self._cluster = cluster

    def run(self, operation: Callable[[RespConnection], T], *, asking: bool = False) -> T:
        """See RedisServer."""
        try:
            return super().run(operation, asking=asking)
        except ServerError as error:
            endpoint = _target(error)
            if asking or error.code != "ASK" or endpoint is None:
                raise
            return self._cluster.node(endpoint).run(operation, asking=True)

    def _probe(self) -> None:
        try:
            super()._probe()
        finally:
            self._cluster.refresh()  # other servers may own its slots now


class RedisCluster(Topology):
    """A Redis Cluster. The seeds are asked for the map when no other server answers."""

    def __init__(
        self,
        seeds: Sequence[Endpoint],
        connect: Callable[[Endpoint], RespConnection],
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connect = connect
        self.listener = listener
        self._clock = clock
        self._seeds = [ClusterNode(endpoint, self) for endpoint in seeds]
        self._refreshing = threading.Lock()  # threads without a map wait for it
        self._lock = threading.Lock()  # protects the following
        self._nodes: dict[Endpoint, ClusterNode] = {}
        self._slots: SlotMap = [None] * _NUM_SLOTS
        self._next_refresh = 0.0

    def servers(self) -> Sequence[RedisServer]:
        """See Topology; the seeds while no map is known."""
        with self._lock:
            return tuple(self._nodes.values()) or self._seeds

    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """See Topology; one server or none."""
        slot = binascii.crc_hqx(hash_tag(object_id.row_key).encode(), 0) % _NUM_SLOTS
        owner = self._owner(slot)
        if owner is None or owner.circuit.is_open:
            self.refresh()
            owner = self._owner(slot)
        return (owner,) if owner else ()

    def learn(self, error: ServerError) -> bool:
        """See Topology. Parses ``MOVED 3999 127.0.0.1:6381``."""
        if error.code != "MOVED":
            return False
        self.refresh()
        endpoint, slot = _target(error), str(error).partition(" ")[2].partition(" ")[0]
        if endpoint and slot.isdecimal():
            with self._lock:
                self._slots[int(slot) % _NUM_SLOTS] = endpoint
        return True

    def refresh(self) -> None:
        """See Topology; at most once a second."""
        with self._refreshing:
            now = self._clock()
            if now < self._next_refresh:
                return
            self._next_refresh = now + _REFRESH_SECONDS
            for server in (*self.servers(), *self._seeds):
                try:
                    slots = server.run(lambda c: _slot_map(c.call("CLUSTER", "SLOTS"), c.endpoint.host))
                except (TierUnavailableError, ServerError):
                    continue
                if any(slots):  # otherwise it is not a member of a cluster
                    self._adopt(slots)
                    return

    def node(self, endpoint: Endpoint) -> ClusterNode:
        """Return the server at this endpoint; adds a new one if necessary."""
        with self._lock:
            return self._nodes.get(endpoint) or self._nodes.setdefault(endpoint, ClusterNode(endpoint, self))

    def close(self) -> None:
        """See Topology."""
        for server in (*self._nodes.values(), *self._seeds):
            server.close()

    def _owner(self, slot: int) -> RedisServer | None:
        endpoint = self._slots[slot]
        return self.node(endpoint) if endpoint else None

    def _adopt(self, slots: SlotMap) -> None:
        owning = {endpoint for endpoint in slots if endpoint}
        with self._lock:
            self._slots = slots
            removed = [self._nodes.pop(endpoint) for endpoint in self._nodes.keys() - owning]
        for node in removed:
            node.close()
        for endpoint in owning:
            self.node(endpoint)
        self.listener(False)


def _target(error: ServerError) -> Endpoint | None:
    """Return the target of a MOVED or ASK reply, or None if it has none."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
    try:
        return endpoint_of(host.encode(), port.encode())
    except ConnectionError:
        return None


def _slot_map(reply: Reply, asked_host: str) -> SlotMap:
    """Parse the reply to CLUSTER SLOTS: ranges of ``[first, last, [host, port, ...], replicas...]``.

    A server that does not know its own name omits the host. The host is then the one that was asked."""
    slots: SlotMap = [None] * _NUM_SLOTS
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int(first), int(last), [bytes() | None as host, port, *_], *_] if (
                0 <= first <= last < _NUM_SLOTS
            ):
                endpoint = endpoint_of(host or asked_host.encode(), port)
                slots[first : last + 1] = [endpoint] * (last + 1 - first)
            case _:
                raise ConnectionError(f"unexpected reply {entry!r:.64}")
    return slots
