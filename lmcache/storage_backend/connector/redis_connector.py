"""Connectors for Redis and Valkey: one server, Sentinel, or Cluster. Each chunk is one value.

The connectors use only get, set, exists, scan and close of redis-py's client, and pipeline if it exists. Any
object with these methods can replace the client. The classes of redis-py are looked up when a connector is
created, and get a time-out if they accept one. ``rediss://`` trusts the system's certificate authorities and
those in the file SSL_CERT_FILE.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmcache.storage_backend.connector.base_connector import RemoteBytesConnector

T = TypeVar("T")

_redis: Any = redis  # many of its signatures are untyped

_TIMEOUTS = {
    "socket_connect_timeout": 2.0,
    "socket_timeout": 3.0,  # seconds, for one read or write
    # Retry once if a connection broke while idle. A time-out is not retried, because it already cost enough.
    "retry": Retry(NoBackoff(), 1, (redis.ConnectionError,)),
}
_SCAN = {"count": 1000}


class _ClientConnector(RemoteBytesConnector):
    """A connector that uses a client of redis-py. ``connect`` creates the client at the first use."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    @cached_property
    def connection(self) -> Any:
        """The client."""
        return self._connect()

    def exists(self, key: str) -> bool:
        """See RemoteConnector."""
        return bool(_guarded(lambda: self.connection.exists(key)))

    def get(self, key: str) -> bytes | None:
        """See RemoteConnector."""
        value: bytes | None = _guarded(lambda: self.connection.get(key))
        return value

    def set(self, key: str, obj: bytes) -> None:
        """See RemoteConnector."""
        _guarded(lambda: self.connection.set(key, obj))

    def list(self) -> list[str]:
        """See RemoteConnector."""
        return _guarded(lambda: list(dict.fromkeys(map(_text, self._scan()))))

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        """See RemoteConnector."""
        return _guarded(lambda: list(map(bool, self._batch("exists", keys))))

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See RemoteConnector."""
        return _guarded(lambda: self._batch("get", keys))

    def close(self) -> None:
        """See RemoteConnector."""
        if "connection" in self.__dict__:
            self.connection.close()

    def _batch(self, command: str, keys: Sequence[str]) -> Sequence[Any]:
        """Send one command per key, in one round trip if possible (MGET can't span a Cluster's slots)."""
        if len(keys) < 2 or not hasattr(self.connection, "pipeline"):
            return [getattr(self.connection, command)(key) for key in keys]
        with self.connection.pipeline(transaction=False) as pipeline:
            for key in keys:
                getattr(pipeline, command)(key)
            answers: Sequence[Any] = pipeline.execute()
        return answers

    def _scan(self) -> Iterable[bytes | str]:
        scan = self.connection.scan
        options = _accepted_by(scan, _SCAN)
        cursor, names = scan(cursor=0, **options)
        yield from names
        while cursor != 0:
            cursor, names = scan(cursor=cursor, **options)
            yield from names


class RedisConnector(_ClientConnector):
    """Connects to one server. ``options`` are arguments of ``redis.Redis`` (db, username, password, ssl)."""

    def __init__(self, host: str, port: int, **options: Any) -> None:
        options = _accepted_by(_redis.Redis, _TIMEOUTS) | options
        client = _redis.Redis(host=host, port=port, **options)
        super().__init__(lambda: client)


class RedisSentinelConnector(_ClientConnector):
    """Connects to the master that Sentinel names. Reads use the master, too, because replicas lag behind.

    Two environment variables configure it: REDIS_SERVICE_NAME (default: mymaster) is the service, and
    REDIS_TIMEOUT (default: 1) the time-out in seconds. ``options`` are arguments of the master's client.
    Raises ValueError if REDIS_TIMEOUT is not a number.
    """

    def __init__(self, hosts_and_ports: Sequence[tuple[str, int]], **options: Any) -> None:
        timeout = float(os.environ.get("REDIS_TIMEOUT") or 1)
        sentinel = _redis.Sentinel(list(hosts_and_ports), socket_timeout=timeout)
        service = os.environ.get("REDIS_SERVICE_NAME") or "mymaster"
        timeouts = _accepted_by(sentinel.master_for, _TIMEOUTS) | {"socket_timeout": timeout}
        client = sentinel.master_for(service, **timeouts, **options)
        super().__init__(lambda: client)


class RedisClusterConnector(_ClientConnector):
    """Connects to a Cluster through any of the given nodes, at the first call.

    Nothing is retried, because redis-py's client for clusters would also retry after a time-out.
    """

    def __init__(self, hosts_and_ports: Sequence[tuple[str, int]], **options: Any) -> None:
        nodes = [_redis.cluster.ClusterNode(host, port) for host, port in hosts_and_ports]
        timeouts = _TIMEOUTS | {"retry": Retry(NoBackoff(), 0)}
        super().__init__(lambda: _redis.RedisCluster(startup_nodes=nodes, **timeouts, **options))

    def _scan(self) -> Iterable[bytes | str]:
        yield from self.connection.scan_iter(**_SCAN)  # it has one cursor per node


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode(errors="surrogateescape")


def _guarded(call: Callable[[], T]) -> T:
    try:
        return call()
    except redis.ResponseError as error:
        raise ValueError(f"Redis refuses the request: {error}") from error
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        raise ConnectionError(f"Redis: {error}") from error


def _accepted_by(call: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for which ``call`` has parameters."""
    parameters = inspect.signature(call).parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if accepts_any or name in parameters}
