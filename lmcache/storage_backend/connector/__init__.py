"""Connectors to remote stores, and their selection by URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from lmcache.config import GlobalConfig
from lmcache.storage_backend.connector.base_connector import (
    ConnectorType,
    RemoteBytesConnector,
    RemoteConnector,
    RemoteConnectorDebugWrapper,
    RemoteTensorConnector,
    check_connector_type,
)
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache_store.tiers.remote.address import Endpoint

__all__ = [
    "ConnectorType",
    "CreateConnector",
    "ParsedRemoteURL",
    "RemoteBytesConnector",
    "RemoteConnector",
    "RemoteConnectorDebugWrapper",
    "RemoteTensorConnector",
    "check_connector_type",
    "parse_remote_url",
]


@dataclass
class ParsedRemoteURL:
    """The parts of a remote store's URL: type, addresses and credentials."""

    connector_type: str
    hosts: list[str]
    ports: list[int]
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Database, user and password, if given, as arguments of redis-py's clients."""
        options = {"db": self.database, "username": self.username, "password": self.password}
        return {name: value for name, value in options.items() if value}


def parse_remote_url(url: str) -> ParsedRemoteURL:
    """Parse type://[[user]:password@]host:port[,host:port…][/database].

    User and password are percent-encoded. An IPv6 address is in brackets. Raises ValueError; its message
    never contains the URL, which may contain a password.
    """
    connector_type, separator, rest = url.partition("://")
    userinfo, _, location = rest.rpartition("@")
    nodes, _, database = location.partition("/")
    username, _, password = userinfo.partition(":")
    if not connector_type or not separator or not database.isascii() or not (database or "0").isdigit():
        raise ValueError("Invalid remote url: write type://host:port, or for Redis type://host:port/database")
    try:
        endpoints = [Endpoint.parse(node, default_port=0) for node in nodes.split(",")]
    except ValueError as error:
        raise ValueError(f"remote URL: {error}") from None
    return ParsedRemoteURL(
        connector_type,
        [endpoint.host for endpoint in endpoints],
        [endpoint.port for endpoint in endpoints],
        unquote(username),
        unquote(password),
        int(database or 0),
    )


def CreateConnector(url: str, device: str | None = None) -> RemoteConnector[Any]:
    """Create the connector for ``url``. It connects at its first use.

    Supported types: redis:// and rediss:// (one server), redis-sentinel://, redis-cluster://, and lm://
    (``lmcache.server``). ``device`` is reserved for connectors of tensors and has no effect. Raises
    ValueError for an invalid or unsupported URL.
    """
    parsed = parse_remote_url(url)
    connector = _create(parsed, list(zip(parsed.hosts, parsed.ports, strict=True)))
    return RemoteConnectorDebugWrapper(connector) if GlobalConfig.is_debug() else connector


def _create(parsed: ParsedRemoteURL, nodes: list[tuple[str, int]]) -> RemoteConnector[Any]:
    kind, options = parsed.connector_type, parsed.options
    if kind in ("redis", "rediss", "lm") and len(nodes) > 1:
        raise ValueError(f"Invalid remote url: {kind}:// takes one host")
    if kind == "lm" and options:
        raise ValueError("Invalid remote url: lm:// takes neither user, password nor database")
    if kind == "redis-cluster" and "db" in options:
        raise ValueError("Invalid remote url: a Redis Cluster has only database 0")
    if kind == "lm":
        return LMCServerConnector(*nodes[0])

    # redis-py is an optional dependency and slow to import.
    from lmcache.storage_backend.connector import redis_connector

    if kind in ("redis", "rediss"):
        if kind == "rediss":
            options["ssl"] = True
        return redis_connector.RedisConnector(*nodes[0], **options)
    if kind == "redis-sentinel":
        return redis_connector.RedisSentinelConnector(nodes, **options)
    if kind == "redis-cluster":
        return redis_connector.RedisClusterConnector(nodes, **options)
    raise ValueError(f"Unknown connector type {kind!r}: use redis, rediss, redis-sentinel, redis-cluster, lm")
