"""The interface of the server's storage backends."""

from __future__ import annotations

import abc

from lmcache_store.tiers.header import Buffer


class LMSBackendInterface(abc.ABC):
    """A thread-safe store of objects by key, bounded in bytes.

    A fault of the medium is a miss, and is logged.
    """

    @abc.abstractmethod
    def put(self, key: str, kv_chunk_bytes: Buffer) -> None:
        """Store an object, or replace it. An object that does not fit is dropped.

        The caller must not change the bytes afterwards.
        """

    @abc.abstractmethod
    def contains(self, key: str) -> bool:
        """Return whether the object is stored. The cost does not depend on the number of objects."""

    @abc.abstractmethod
    def get(self, key: str) -> Buffer | None:
        """Return the object, or None for a miss. The caller must not change the bytes."""

    @abc.abstractmethod
    def list_keys(self) -> list[str]:
        """Return the keys of all objects."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources."""
