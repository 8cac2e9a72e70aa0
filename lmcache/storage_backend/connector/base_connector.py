"""What a connector to a remote store is.

**Faults.** When the store can't be reached or does not answer, methods raise ConnectionError (Python's own)
within the connector's deadlines. When it answers that it won't (no room, no right, a key it can't hold), they
raise ValueError. Nothing else; a miss is None or False. The remote backend is the layer that turns both into
a miss or a counted drop, so that no fault reaches the engine.
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
    """What a connector takes and returns."""

    BYTES = 1
    TENSOR = 2


class RemoteConnector(abc.ABC, Generic[V]):
    """A store of values by key text (``CacheEngineKey.to_string()``). Thread-safe; every method may block,
    and may raise ConnectionError and ValueError (see the module)."""

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """Is there a value?"""

    @abc.abstractmethod
    def get(self, key: str) -> V | None:
        """Return the value; None: a miss."""

    @abc.abstractmethod
    def set(self, key: str, obj: V) -> None:
        """Store the value; it is stored when this returns."""

    @abc.abstractmethod
    def list(self) -> list[str]:
        """Return the names of all values, each once, whoever has put them there."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close connections; the threads that used them must have ended."""

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return ``exists`` of each key, in one round trip where the store offers that."""
        return [self.exists(key) for key in keys]

    def get_many(self, keys: Sequence[str]) -> Sequence[V | None]:
        """Return ``get`` of each key, in one round trip where the store offers that."""
        return [self.get(key) for key in keys]


class RemoteBytesConnector(RemoteConnector[bytes]):
    """Values are opaque bytes: a serde makes them."""


class RemoteTensorConnector(RemoteConnector[torch.Tensor]):
    """Values are tensors; there is no serde."""


class RemoteConnectorDebugWrapper(RemoteConnector[Any]):
    """Says at level DEBUG how long each call of another connector took."""

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
    """Return what the connector takes; raises ValueError when it is of neither kind."""
    if isinstance(connector, RemoteConnectorDebugWrapper):
        return check_connector_type(connector.connector)
    if isinstance(connector, RemoteBytesConnector):
        return ConnectorType.BYTES
    if isinstance(connector, RemoteTensorConnector):
        return ConnectorType.TENSOR
    raise ValueError(f"Unknown connector type: {type(connector).__name__}")
