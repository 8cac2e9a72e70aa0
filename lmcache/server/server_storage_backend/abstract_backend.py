"""What a storage of the server is."""

from __future__ import annotations

import abc

from lmcache.tiers.header import Buffer


class LMSBackendInterface(abc.ABC):
    """Objects by key, bounded in bytes; thread-safe. A fault of the medium is a miss, said in the log."""

    @abc.abstractmethod
    def put(self, key: str, kv_chunk_bytes: Buffer) -> None:
        """Keep these bytes, which must not change any more, in place of what is there. One that does not
        fit is dropped."""

    @abc.abstractmethod
    def contains(self, key: str) -> bool:
        """Is it there? Costs the same however many there are."""

    @abc.abstractmethod
    def get(self, key: str) -> Buffer | None:
        """Return the bytes, which must not be changed; None: a miss."""

    @abc.abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything."""
