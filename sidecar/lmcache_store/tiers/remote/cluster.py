"""Redis Cluster: which server owns which of the 16384 hash slots.

The client requests the slot map at the start, when a server fails, and when a server replies that a slot
moved. It accepts the map of any server. It requests the map at most once a second. When a single slot moved,
the reply itself names the new owner.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
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

logger = logging.getLogger(__name__)

_NUM_SLOTS = 1 << 14
_REFRESH_SECONDS = 1.0
_NO_NAME = "?"
"""Host of a server without an announced name, if the cluster prefers names. It is never resolved."""
_LACKS_NAMES = (
    "the cluster prefers host names, but some of its servers announce none; using their addresses. "
    "Set cluster-announce-hostname on all servers, or cluster-preferred-endpoint-type to ip"
)

SlotMap = list[Endpoint | None]


class ClusterNode(RedisServer):
    """A server of a cluster. If it replies ASK for a migrating slot, the operation runs on the target."""

    non_fatal_errors = RedisServer.non_fatal_errors | {"ASK", "MOVED"}

    def __init__(self, endpoint: Endpoint, cluster: RedisCluster) -> None:
        super().__init__(str(endpoint), lambda: cluster.connect(endpoint), cluster.listener)
        self.endpoint = endpoint
        self._cluster = cluster

    def run(self, operation: Callable[[RespConnection], T], *, asking: bool = False) -> T:
        """See RedisServer."""
        try:
            return super().run(operation, asking=asking)
        except ServerError as error:
            endpoint = _target(error, self.endpoint)
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
        self._has_reported_names = False  # names that servers lack

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

    def learn(self, error: ServerError, server: RedisServer) -> bool:
        """See Topology. Parses ``MOVED 3999 127.0.0.1:6381``."""
        if error.code != "MOVED" or not isinstance(server, ClusterNode):
            return False
        self.refresh()
        endpoint, word = _target(error, server.endpoint), str(error).partition(" ")[2].partition(" ")[0]
        if endpoint and word.isdecimal():
            slot = int(word) % _NUM_SLOTS
            with self._lock:
                # Another owner is from a newer reply, or from the map, which knows addresses without names.
                if self._slots[slot] in (None, server.endpoint):
                    self._slots[slot] = endpoint
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
                    slots, lacks_names = server.run(
                        lambda c: _slot_map(c.call("CLUSTER", "SLOTS"), c.endpoint.host)
                    )
                except (TierUnavailableError, ServerError):
                    continue
                if any(slots):  # otherwise it is not a member of a cluster
                    if lacks_names and not self._has_reported_names:
                        self._has_reported_names = True
                        logger.warning("remote tier %s: %s", server.name, _LACKS_NAMES)
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


def _target(error: ServerError, asked: Endpoint) -> Endpoint | None:
    """Return the target of a MOVED or ASK reply of the asked server, or None if it names no other server.

    A server that has no name for the target omits the host, or writes ``?``. Clients then use the host that
    they asked, with the port of the reply."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
    host = asked.host if host == _NO_NAME else host.strip("[]") or asked.host
    with contextlib.suppress(ConnectionError):
        target = endpoint_of(host.encode(), port.encode())
        return None if target == asked else target
    return None


def _slot_map(reply: Reply, asked_host: str) -> tuple[SlotMap, bool]:
    """Parse the reply to CLUSTER SLOTS: ranges of ``[first, last, [host, port, ...], replicas...]``.

    A server that does not know its own name omits the host. The host is then the one that was asked. Slots of
    a server without a usable address have no owner: a cluster reports port 0 for a lost server.

    Returns:
        the map, and whether a server lacks an announced name
    """
    slots: SlotMap = [None] * _NUM_SLOTS
    lacks_names = False
    for entry in reply if isinstance(reply, list) else ():
        match entry:
            case [int(first), int(last), [bytes() | None as host, port, *more], *_] if (
                0 <= first <= last < _NUM_SLOTS
            ):
                if host == _NO_NAME.encode():
                    lacks_names, host = True, _address(more)
                with contextlib.suppress(ConnectionError):
                    endpoint = endpoint_of(host or asked_host.encode(), port)
                    slots[first : last + 1] = [endpoint] * (last + 1 - first)
            case _:
                raise ConnectionError(f"unexpected reply {entry!r:.64}")
    return slots, lacks_names


def _address(more: list[Reply]) -> bytes | None:
    """Return the IP address in ``[id, [b"ip", address, ...]]``, or None."""
    match more:
        case [_, [*words], *_]:
            pairs = zip(words[::2], words[1::2], strict=False)
            return next((value for name, value in pairs if name == b"ip" and isinstance(value, bytes)), None)
    return None
