"""Addresses of the remote tier: the forms of its URL.

| URL | servers |
|---|---|
| ``redis://[[user]:password@]host[:port][/db]`` | one server |
| ``redis://host1:port1,host2:port2[/db]`` | shards: each chunk is on one of them, by rendezvous hashing |
| ``unix://[[user]:password@]/path[?db=0]`` | one server, on its UNIX socket |
| ``redis-sentinel://host1:port1,host2:port2/service[/db]`` | the master of a service, which Sentinels name |
| ``redis-cluster://host1:port1,host2:port2`` | a Redis Cluster; the hosts are its seeds |
| ``rediss://``, ``rediss-sentinel://``, ``rediss-cluster://`` | the same with TLS |

Options follow ``?`` and are joined by ``&``. Write special characters as ``%XX``.

| option | meaning | default |
|---|---|---|
| ``prefix`` | start of all Redis keys: letters, digits and ``_.-`` | ``lmc1`` |
| ``db`` | database number, for ``unix://`` | 0 |
| ``ca`` | file with the authorities for the server's certificate | the system's |
| ``cert``, ``key`` | files with the client's certificate and its key | none |
| ``verify`` | ``full``; ``ca``: skip the host name check; ``none``: skip all checks | ``full`` |

The user needs the commands HSET, HGET, HMGET, HEXISTS and PING. In addition:

- with Sentinels: ROLE
- in a cluster: CLUSTER SLOTS and ASKING
- if ``db`` is not 0: SELECT
- INFO (optional) shows the tier how long a server keeps values.
- UNLINK (optional) deletes a row that the server evicted while the tier wrote it.
- ZADD, ZREMRANGEBYRANK, EXPIRE and ZREVRANGEBYSCORE (optional) share marks of documents (``marks.py``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

DEFAULT_PREFIX = "lmc1"

_PORT = 6379
_SENTINEL_PORT = 26379
_URL = re.compile(r"(redis|unix)(s?)(-sentinel|-cluster)?://([^/?]*)([^?]*)(?:\?(.*))?", re.DOTALL)
_SCHEMES = "redis, unix, redis-sentinel, redis-cluster, rediss, rediss-sentinel, rediss-cluster"
_ENDPOINT = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/@,\[\]]+))(?::([0-9]{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TLS_OPTIONS = frozenset({"ca", "cert", "key", "verify"})


class AddressKind(enum.Enum):
    """How the servers of an address form one tier."""

    SHARDS = "redis"
    UNIX = "unix"
    SENTINEL = "redis-sentinel"
    CLUSTER = "redis-cluster"


class Endpoint(NamedTuple):
    """Address on which one server listens."""

    host: str  # or the path of a UNIX socket, which starts with "/"
    port: int = 0

    def __str__(self) -> str:
        if self.host.startswith("/"):
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = _PORT) -> Endpoint:
        """Parse ``host[:port]`` or ``[IPv6][:port]``.

        Raises ValueError if the text is invalid. With a default port of 0, the text must have a port."""
        match = _ENDPOINT.fullmatch(text)
        port = int(match[3] or default_port) if match else 0
        if match is None or not 0 < port < 65536:
            raise ValueError("the host or port can't be read")
        return cls(match[1] or match[2], port)


def parse_endpoints(texts: Sequence[str], default_port: int = _PORT) -> tuple[Endpoint, ...]:
    """Parse several endpoints. Raises ValueError if one is invalid or appears twice."""
    endpoints = tuple(Endpoint.parse(text, default_port) for text in texts)
    if len(set(endpoints)) < len(endpoints):
        raise ValueError("a host is listed twice")
    return endpoints


@dataclass(frozen=True)
class Tls:
    """TLS options: authorities, and the client's certificate and key, as paths of PEM files ("": none)."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: str = "full"  # or "ca", or "none"


@dataclass(frozen=True)
class Address:
    """Servers and credentials of a remote tier."""

    kind: AddressKind
    endpoints: tuple[Endpoint, ...]
    service: str = ""  # name of the service that the Sentinels watch
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        endpoints = ",".join(str(endpoint) for endpoint in self.endpoints)
        return f"{self.service} of {endpoints}" if self.service else endpoints

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL. Raises ValueError with the reason. The message never holds the password."""
        match = _URL.fullmatch(url)
        if match is None or (match[1] == "unix" and (match[2] or match[3])):
            start = re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,30}(?=:)", url)
            raise ValueError(f"remote URL: scheme {start[0] if start else ''!r} is not one of {_SCHEMES}")
        scheme, tls, form, authority, path, query = match.groups(default="")
        if "@" in path + query:  # probably part of a password: show nothing of it
            raise ValueError("remote URL: write special characters as %XX, for example '@' as %40")
        kind = AddressKind(scheme + form)
        userinfo, _, hosts = authority.rpartition("@")
        username, _, password = userinfo.partition(":")
        options = _options(query, kind, has_tls=bool(tls))
        service, database = _service_and_database(kind, path, options.get("db", ""))
        prefix = options.get("prefix", DEFAULT_PREFIX)
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"remote URL: prefix {prefix!r} may hold letters, digits, '_', '.' and '-' only")
        return cls(
            kind,
            _endpoints(kind, hosts, path),
            service,
            database,
            unquote(username),
            unquote(password),
            _tls(options) if tls else None,
            prefix,
        )


def _options(query: str, kind: AddressKind, *, has_tls: bool) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    allowed = (
        {"prefix"} | (_TLS_OPTIONS if has_tls else set()) | ({"db"} if kind is AddressKind.UNIX else set())
    )
    for name in options.keys() - allowed:
        hint = ", it needs rediss://" if name in _TLS_OPTIONS else ""
        raise ValueError(f"remote URL: option {name!r} is not one of {', '.join(sorted(allowed))}{hint}")
    return options


def _endpoints(kind: AddressKind, hosts: str, path: str) -> tuple[Endpoint, ...]:
    if kind is AddressKind.UNIX:
        if not path.strip("/") or hosts:
            raise ValueError("remote URL: unix:// needs an absolute path, as in unix:///run/redis.sock")
        return (Endpoint(unquote(path)),)
    if not hosts:
        raise ValueError(f"remote URL: {kind.value}:// needs a host, as in {kind.value}://cache.example:6379")
    try:
        return parse_endpoints(hosts.split(","), _SENTINEL_PORT if kind is AddressKind.SENTINEL else _PORT)
    except ValueError as error:
        raise ValueError(f"remote URL: {error}") from None


def _service_and_database(kind: AddressKind, path: str, database: str) -> tuple[str, int]:
    service = ""
    if kind is not AddressKind.UNIX:
        database = path.strip("/")
    if kind is AddressKind.SENTINEL:
        service, _, database = database.partition("/")
        service = unquote(service)
        if not service:
            raise ValueError(
                "remote URL: redis-sentinel:// needs a service, as in redis-sentinel://host:26379/mymaster"
            )
    if not re.fullmatch("[0-9]{0,9}", database):
        raise ValueError("remote URL: the database is not a number")
    if kind is AddressKind.CLUSTER and int(database or 0):
        raise ValueError("remote URL: a Redis Cluster has database 0 only")
    return service, int(database or 0)


def _tls(options: dict[str, str]) -> Tls:
    tls = Tls(**{name: value for name, value in options.items() if name in _TLS_OPTIONS})
    if tls.verify not in ("full", "ca", "none"):
        raise ValueError(f"remote URL: verify={tls.verify!r} is not one of full, ca, none")
    if tls.key and not tls.cert:
        raise ValueError("remote URL: key= needs cert=")
    return tls
