"""Topologies: which server owns an object, and which others may hold it. Shards and Sentinels.

Redis Cluster is in ``cluster.py``.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import xxhash

from lmcache_store.tiers.base import Listener, ObjectId, RowKey
from lmcache_store.tiers.errors import ServerError
from lmcache_store.tiers.remote.address import Address, Endpoint
from lmcache_store.tiers.remote.resp import RespConnection
from lmcache_store.tiers.remote.server import RedisServer


class Topology(ABC):
    """The servers of a remote tier. Thread-safe."""

    @abstractmethod
    def servers(self) -> Sequence[RedisServer]:
        """Return the servers that own objects now. The tier is unavailable when all circuits are open."""

    @abstractmethod
    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """Return the owner of an object, then other servers that may hold it. Empty: no known owner."""

    def learn(self, error: ServerError, server: RedisServer) -> bool:
        """Learn from an error reply of a server. True: another server is the owner; ask that server."""
        return False

    def refresh(self) -> None:  # noqa: B027, most topologies are fixed
        """Update the list of servers, if a server can report it."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True)
class ShardList:
    """The shards, and their list before the latest change."""

    current: tuple[Endpoint, ...]
    previous: tuple[Endpoint, ...] = ()
    until: float = 0.0  # Unix time until which the previous owner of a row is asked, too
    secure: frozenset[Endpoint] = frozenset()  # shards with TLS, if the address has none
    ca: str = ""  # file with the authorities for their certificates; empty: the system's


class ShardsTopology(Topology):
    """Independent servers. Each row has one owner among them, by rendezvous hashing.

    The owner is the server with the greatest hash of (its endpoint as the list writes it, row key). If a
    server leaves, only its own rows move. If a server joins, it takes 1/N of the rows of each other server.
    All columns of a row have the same owner. The loss of a shard therefore costs 1/N of the rows.
    """

    def __init__(
        self,
        shards: ShardList,
        make_server: Callable[[Endpoint], RedisServer],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._make_server = make_server
        self._now = now
        self._pools: dict[Endpoint, RedisServer] = {}
        self.change(shards)

    def change(self, shards: ShardList) -> None:
        """Switch to another list. Servers in both lists keep their connections. Raises ValueError."""
        if not shards.current:
            raise ValueError("a remote tier needs a shard")
        old = self._pools
        wanted = dict.fromkeys((*shards.current, *shards.previous))
        self._pools = {endpoint: old.get(endpoint) or self._make_server(endpoint) for endpoint in wanted}
        current, previous = (
            [(_seed(endpoint), self._pools[endpoint]) for endpoint in endpoints]
            for endpoints in (shards.current, shards.previous)
        )
        self._lists = current, previous, shards.until  # one assignment: other threads are reading
        for endpoint in old.keys() - wanted.keys():
            old[endpoint].close()

    def servers(self) -> Sequence[RedisServer]:
        """See Topology."""
        return [server for _, server in self._lists[0]]

    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """See Topology: the owner, and before ``until`` also the previous owner if it differs."""
        current, previous, until = self._lists
        owner = _greatest(current, object_id.row_key)
        if not previous or self._now() >= until:
            return (owner,)
        before = _greatest(previous, object_id.row_key)
        return (owner,) if before is owner else (owner, before)

    def close(self) -> None:
        """See Topology."""
        for server in self._pools.values():
            server.close()


class SentinelMaster(Topology):
    """The master of a service. Replicas are not used, because they may lag behind.

    Every new connection asks the Sentinels. Connections are closed when the server fails, or replies that it
    is read-only. The client thus finds the new master after a failover. ``present`` returns the address with
    the current credentials.
    """

    def __init__(
        self,
        address: Address,
        present: Callable[[], Address],
        connect: Callable[[Endpoint, Address], RespConnection],
        listener: Listener,
    ) -> None:
        self._address = address
        self._present = present
        self._anonymous = replace(address, username="", password="", database=0)
        self._connect = connect
        self._sentinels = list(address.endpoints)
        self._server = RedisServer(str(address), self._connect_to_master, listener)

    def servers(self) -> Sequence[RedisServer]:
        """See Topology."""
        return (self._server,)

    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """See Topology."""
        return (self._server,)

    def close(self) -> None:
        """See Topology."""
        self._server.close()

    def _connect_to_master(self) -> RespConnection:
        endpoint = self._find_master()
        connection = self._connect(endpoint, self._present())
        try:
            role = connection.call("ROLE")
            if not isinstance(role, list) or role[:1] != [b"master"]:
                raise ConnectionError(f"{endpoint} is not the master that the Sentinels report")
        except BaseException:
            connection.close()
            raise
        return connection

    def _find_master(self) -> Endpoint:
        problems = []
        for sentinel in self._sentinels[:]:
            try:
                master = self._ask(sentinel)
            except (OSError, ServerError) as error:
                problems.append(f"{sentinel}: {error}")
                continue
            # From now on, ask the Sentinel that answered first. (A race affects only the order.)
            self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
            return master
        raise ConnectionError(f"no Sentinel names a master: {'; '.join(problems)}")

    def _ask(self, sentinel: Endpoint) -> Endpoint:
        """Ask one Sentinel for the master. If it needs a password, it is the servers' password."""
        words = ("SENTINEL", "get-master-addr-by-name", self._address.service)
        with contextlib.closing(self._connect(sentinel, self._anonymous)) as connection:
            try:
                reply = connection.call(*words)
            except ServerError as error:
                if error.code != "NOAUTH":
                    raise
                present = self._present()
                connection.authenticate(present.username, present.password)
                reply = connection.call(*words)
        if reply is None:
            raise ConnectionError(f"the Sentinel knows no service {self._address.service!r}")
        if not isinstance(reply, list) or len(reply) != 2:
            raise ConnectionError(f"unexpected reply {reply!r:.64}")
        return endpoint_of(*reply)


def endpoint_of(host: object, port: object) -> Endpoint:
    """Convert a server's reply to an endpoint. Raises ConnectionError if it is invalid."""
    try:
        text = host.decode() if isinstance(host, bytes) else ""
        number = int(port) if isinstance(port, bytes | int) else 0
    except ValueError:
        text, number = "", 0
    if text[:1] in ("", "/", "?") or not 0 < number < 65536:  # a path would be a socket on this node
        raise ConnectionError(f"unexpected address {host!r:.64} {port!r:.64}")
    return Endpoint(text, number)


def _seed(endpoint: Endpoint) -> int:
    seed: int = xxhash.xxh3_64_intdigest(str(endpoint).encode())
    return seed


def _greatest(shards: Sequence[tuple[int, RedisServer]], key: RowKey) -> RedisServer:
    return max(shards, key=lambda shard: int(xxhash.xxh3_64_intdigest(key, shard[0])))[1]
