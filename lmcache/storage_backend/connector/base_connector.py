"""The interface of connectors to remote stores.

**Faults.** If the store can't be reached or does not answer, methods raise Python's ConnectionError within
the connector's deadlines. If the store refuses a request (no capacity, no permission, an unsupported key),
they raise ValueError. They raise nothing else. A miss is None or False. The remote backend turns both
exceptions into a miss or a counted drop, so that no fault reaches the engine.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from lmcache.logging import init_logger

logger = init_logger(__name__)

V = TypeVar("V")
T = TypeVar("T")


class ConnectorType(Enum):
    """Type of the values that a connector stores and returns."""

    BYTES = 1
    TENSOR = 2


class RemoteConnector(abc.ABC, Generic[V]):
    """A thread-safe store of values by the text of their keys (``CacheEngineKey.to_string()``).

    Every method may block, and may raise ConnectionError or ValueError. The module's docstring says when.
    """

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """Return whether the store has a value for the key."""

    @abc.abstractmethod
    def get(self, key: str) -> V | None:
        """Return the value, or None for a miss."""

    @abc.abstractmethod
    def set(self, key: str, obj: V) -> None:
        """Store the value, and return when it is stored."""

    @abc.abstractmethod
    def list(self) -> list[str]:
        """Return the keys of all values in the store, each once, including those of other programs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections. The threads that used them must have ended."""

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return ``exists`` of each key, in one round trip if the store supports that."""
        return [self.exists(key) for key in keys]

    def get_many(self, keys: Sequence[str]) -> Sequence[V | None]:
        """Return ``get`` of each key, in one round trip if the store supports that."""
        return [self.get(key) for key in keys]


class RemoteBytesConnector(RemoteConnector[bytes]):
    """A connector whose values are opaque bytes, converted by a serde."""


class RemoteTensorConnector(RemoteConnector[torch.Tensor]):
    """A connector whose values are tensors, without a serde."""


class RemoteConnectorDebugWrapper(RemoteConnector[Any]):
    """Logs the duration of each call of another connector at level DEBUG."""

    def __init__(self, connector: RemoteConnector[Any]) -> None:
        self.connector = connector

    def exists(self, key: str) -> bool:
        """See RemoteConnector."""
        return self._timed("exists", self.connector.exists, key)

    def get(self, key: str) -> Any:
        """See RemoteConnector."""
        return self._timed("get", self.connector.get, key)

    def set(self, key: str, obj: Any) -> None:
        """See RemoteConnector."""
        self._timed("set", self.connector.set, key, obj)

    def list(self) -> list[str]:
        """See RemoteConnector."""
        return self._timed("list", self.connector.list)

    def close(self) -> None:
        """See RemoteConnector."""
        self.connector.close()

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        """See RemoteConnector."""
        return self._timed("exists_many", self.connector.exists_many, keys)

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        """See RemoteConnector."""
        return self._timed("get_many", self.connector.get_many, keys)

    def _timed(self, name: str, call: Callable[..., T], *arguments: object) -> T:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            logger.debug("%s took %.6f s", name, time.perf_counter() - started)


def check_connector_type(connector: RemoteConnector[Any]) -> ConnectorType:
    """Return the type of a connector's values. Raises ValueError for an unknown type."""
    if isinstance(connector, RemoteConnectorDebugWrapper):
        return check_connector_type(connector.connector)
    if isinstance(connector, RemoteBytesConnector):
        return ConnectorType.BYTES
    if isinstance(connector, RemoteTensorConnector):
        return ConnectorType.TENSOR
    raise ValueError(f"Unknown connector type: {type(connector).__name__}")
