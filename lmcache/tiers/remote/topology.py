"""Which server owns an object, and who else may have it: shards, or one master that Sentinels name.

Redis Cluster is in ``cluster.py``.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import xxhash

from lmcache.tiers.base import Listener, ObjectId, RowKey
from lmcache.tiers.errors import ServerError
from lmcache.tiers.remote.address import Address, Endpoint
from lmcache.tiers.remote.resp import Connection
from lmcache.tiers.remote.server import RedisServer


class Topology(ABC):
    """Thread-safe."""

    @abstractmethod
    def servers(self) -> Sequence[RedisServer]:
        """Those that own something now: the tier is unavailable when all of their circuits are open."""

    @abstractmethod
    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """The owner of an object first, then who else may have it; empty: nobody owns it now."""

    def learn(self, error: ServerError) -> bool:
        """Take note of an error reply. True: the owner is another one than was thought, ask that."""
        return False

    def refresh(self) -> None:  # noqa: B027, most have nobody to ask
        """Look for servers that came or went, as far as somebody can be asked."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True)
class ShardList:
    """The shards, and who they were before a change."""

    current: tuple[Endpoint, ...]
    previous: tuple[Endpoint, ...] = ()
    until: float = 0.0  # Unix time up to which rows are looked for at their previous owner, too
    secure: frozenset[Endpoint] = frozenset()  # those that speak TLS, if the address does not say that all do
    ca: str = ""  # file with the authorities that may sign their certificates; empty: the system's


class Shards(Topology):
    """Servers that know nothing of one another; each row has one owner among them, by rendezvous hashing.

    The owner is that with the greatest hash of (its endpoint as the list writes it, row key): who leaves
    takes only its own rows away, and who comes takes 1/N of everybody's. All columns of a row have the same
    owner, so that losing a shard costs 1/N of the rows.
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
        """Use another list from now on; servers that are in both keep their connections."""
        if not shards.current:
            raise ValueError("a remote tier needs a shard")
        old = self._pools
        wanted = dict.fromkeys((*shards.current, *shards.previous))
        self._pools = {endpoint: old.get(endpoint) or self._make_server(endpoint) for endpoint in wanted}
        current, previous = (
            [(_seed(endpoint), self._pools[endpoint]) for endpoint in endpoints]
            for endpoints in (shards.current, shards.previous)
        )
        self._lists = current, previous, shards.until  # at once: other threads are reading
        for endpoint in old.keys() - wanted.keys():
            old[endpoint].close()

    def servers(self) -> Sequence[RedisServer]:
        """See Topology."""
        return [server for _, server in self._lists[0]]

    def owners(self, object_id: ObjectId) -> Sequence[RedisServer]:
        """See Topology: the owner, and up to ``until`` the previous one if it was another."""
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
    """The master of a service: reads and writes go there only, since a replica may be behind.

    Every new connection asks the Sentinels, and connections are dropped when the server fails or says that it
    is read-only: so the master of after a failover is found by itself. ``present``: the address with the
    credentials of now.
    """

    def __init__(
        self,
        address: Address,
        present: Callable[[], Address],
        connect: Callable[[Endpoint, Address], Connection],
        listener: Listener,
    ) -> None:
        self._address = address
        self._present = present
        self._stranger = replace(address, username="", password="", database=0)
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

    def _connect_to_master(self) -> Connection:
        endpoint = self._find_master()
        connection = self._connect(endpoint, self._present())
        try:
            role = connection.call("ROLE")
            if not isinstance(role, list) or role[:1] != [b"master"]:
                raise ConnectionError(f"{endpoint} is not the master, though the Sentinels say so")
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
            # Who answered is asked first from now on (a race costs the order only).
            self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
            return master
        raise ConnectionError(f"no Sentinel names a master: {'; '.join(problems)}")

    def _ask(self, sentinel: Endpoint) -> Endpoint:
        """Sentinels mostly want no password; one that does has the servers'."""
        words = ("SENTINEL", "get-master-addr-by-name", self._address.service)
        with contextlib.closing(self._connect(sentinel, self._stranger)) as connection:
            try:
                reply = connection.call(*words)
            except ServerError as error:
                if error.code != "NOAUTH":
                    raise
                present = self._present()
                connection.authenticate(present.username, present.password)
                reply = connection.call(*words)
        if reply is None:
            raise ConnectionError(f"it knows no service {self._address.service!r}")
        if not isinstance(reply, list) or len(reply) != 2:
            raise ConnectionError(f"unexpected reply {reply!r:.64}")
        return endpoint_of(*reply)


def endpoint_of(host: object, port: object) -> Endpoint:
    """Make an endpoint of what a server says; raises ConnectionError."""
    try:
        text = host.decode() if isinstance(host, bytes) else ""
        number = int(port) if isinstance(port, bytes | int) else 0
    except ValueError:
        text, number = "", 0
    if text[:1] in ("", "/") or not 0 < number < 65536:  # a path would be a socket of this machine
        raise ConnectionError(f"unexpected address {host!r:.64} {port!r:.64}")
    return Endpoint(text, number)


def _seed(endpoint: Endpoint) -> int:
    seed: int = xxhash.xxh3_64_intdigest(str(endpoint).encode())
    return seed


def _greatest(shards: Sequence[tuple[int, RedisServer]], key: RowKey) -> RedisServer:
    return max(shards, key=lambda shard: int(xxhash.xxh3_64_intdigest(key, shard[0])))[1]
