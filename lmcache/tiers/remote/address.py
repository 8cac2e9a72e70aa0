"""Where the remote tier is: what its URL may say.

| URL | servers |
|---|---|
| ``redis://[[user]:password@]host[:port][/db]`` | one |
| ``redis://host1:port1,host2:port2[/db]`` | shards: every row has one owner, by rendezvous hashing |
| ``unix://[[user]:password@]/path[?db=0]`` | one, by its UNIX socket |
| ``redis-sentinel://host1:port1,host2:port2/service[/db]`` | the master of a service, as its Sentinels say |
| ``redis-cluster://host1:port1,host2:port2`` | a Redis Cluster; the hosts are where to ask for its nodes |
| ``rediss://``, ``rediss-sentinel://``, ``rediss-cluster://`` | the same by TLS |

Options, after ``?`` and joined by ``&``; special characters as ``%XX``:

| option | meaning | default |
|---|---|---|
| ``prefix`` | first word of all names: letters, digits and ``_.-`` | ``lmc1`` |
| ``db`` | database number, for ``unix://`` | 0 |
| ``ca`` | file with the authorities that may sign the server's certificate | the system's |
| ``cert``, ``key`` | files with our certificate and its key | none |
| ``verify`` | ``full``; ``ca``: the host's name may differ; ``none``: anybody may answer | ``full`` |

The user needs HSET, HGET, HMGET, HEXISTS and PING; under Sentinels ROLE; in a cluster CLUSTER SLOTS, ASKING.
SELECT if ``db`` is not 0. With INFO the tier knows how soon a server forgets. With UNLINK it deletes a row
that the server has evicted while the row was written.
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


class Kind(enum.Enum):
    """What the servers of an address are to one another."""

    SHARDS = "redis"
    UNIX = "unix"
    SENTINEL = "redis-sentinel"
    CLUSTER = "redis-cluster"


class Endpoint(NamedTuple):
    """Where one server listens."""

    host: str  # or the path of a UNIX socket, which starts with "/"
    port: int = 0

    def __str__(self) -> str:
        if self.host.startswith("/"):
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = _PORT) -> Endpoint:
        """Read ``host[:port]`` or ``[IPv6][:port]``. Raises ValueError, also without a port if the default is
        0."""
        match = _ENDPOINT.fullmatch(text)
        port = int(match[3] or default_port) if match else 0
        if match is None or not 0 < port < 65536:
            raise ValueError("the host or port can't be read")
        return cls(match[1] or match[2], port)


def parse_endpoints(texts: Sequence[str], default_port: int = _PORT) -> tuple[Endpoint, ...]:
    """Read several. Raises ValueError, also when one is named twice."""
    endpoints = tuple(Endpoint.parse(text, default_port) for text in texts)
    if len(set(endpoints)) < len(endpoints):
        raise ValueError("a host is named twice")
    return endpoints


@dataclass(frozen=True)
class Tls:
    """Whom we trust, and how we show who we are; paths of PEM files, "" for none."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: str = "full"  # or "ca", or "none"


@dataclass(frozen=True)
class Address:
    """Where the servers are, and who we are there."""

    kind: Kind
    endpoints: tuple[Endpoint, ...]
    service: str = ""  # that the Sentinels watch
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
        """Read a URL. Raises ValueError, saying what is wrong; the message never holds the password."""
        match = _URL.fullmatch(url)
        if match is None or (match[1] == "unix" and (match[2] or match[3])):
            start = re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,30}(?=:)", url)
            raise ValueError(f"remote URL: scheme {start[0] if start else ''!r} is not one of {_SCHEMES}")
        scheme, tls, form, authority, path, query = match.groups(default="")
        if "@" in path + query:  # of a password, rather: then nothing of it may be shown
            raise ValueError("remote URL: special characters in it must be written as %XX, '@' as %40")
        kind = Kind(scheme + form)
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


def _options(query: str, kind: Kind, *, has_tls: bool) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    allowed = {"prefix"} | (_TLS_OPTIONS if has_tls else set()) | ({"db"} if kind is Kind.UNIX else set())
    for name in options.keys() - allowed:
        hint = ", it needs rediss://" if name in _TLS_OPTIONS else ""
        raise ValueError(f"remote URL: option {name!r} is not one of {', '.join(sorted(allowed))}{hint}")
    return options


def _endpoints(kind: Kind, hosts: str, path: str) -> tuple[Endpoint, ...]:
    if kind is Kind.UNIX:
        if not path.strip("/") or hosts:
            raise ValueError("remote URL: unix:// needs an absolute path, as in unix:///run/redis.sock")
        return (Endpoint(unquote(path)),)
    if not hosts:
        raise ValueError(f"remote URL: {kind.value}:// needs a host, as in {kind.value}://cache.example:6379")
    try:
        return parse_endpoints(hosts.split(","), _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT)
    except ValueError as error:
        raise ValueError(f"remote URL: {error}") from None


def _service_and_database(kind: Kind, path: str, database: str) -> tuple[str, int]:
    service = ""
    if kind is not Kind.UNIX:
        database = path.strip("/")
    if kind is Kind.SENTINEL:
        service, _, database = database.partition("/")
        service = unquote(service)
        if not service:
            raise ValueError(
                "remote URL: redis-sentinel:// needs a service, as in redis-sentinel://host:26379/mymaster"
            )
    if not re.fullmatch("[0-9]{0,9}", database):
        raise ValueError("remote URL: the database is not a number")
    if kind is Kind.CLUSTER and int(database or 0):
        raise ValueError("remote URL: a Redis Cluster has database 0 only")
    return service, int(database or 0)


def _tls(options: dict[str, str]) -> Tls:
    tls = Tls(**{name: value for name, value in options.items() if name in _TLS_OPTIONS})
    if tls.verify not in ("full", "ca", "none"):
        raise ValueError(f"remote URL: verify={tls.verify!r} is not one of full, ca, none")
    if tls.key and not tls.cert:
        raise ValueError("remote URL: key= needs cert=")
    return tls
