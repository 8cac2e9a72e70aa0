"""A backend's chunks as a dictionary: what the documents call ``.dict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.utils import CacheEngineKey


class ChunksView(Mapping[CacheEngineKey, torch.Tensor]):
    """Read-only and live, the next victim first. A value is a copy; reading one uses the chunk."""

    def __init__(self, backend: LMCBackendInterface, keys: Callable[[], list[CacheEngineKey]]) -> None:
        self._backend = backend
        self._keys = keys

    def __getitem__(self, key: CacheEngineKey) -> torch.Tensor:
        chunk = self._backend.get(key)
        if chunk is None:
            raise KeyError(key)
        return chunk

    def __contains__(self, key: object) -> bool:
        return isinstance(key, CacheEngineKey) and self._backend.contains(key)

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())
