"""The interface of the library's storage backends."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Hashable, Iterable, Iterator

import torch

from lmcache.storage_backend.chunks import Chunks, Keys
from lmcache.utils import CacheEngineKey


class LMCBackendInterface(abc.ABC):
    """Stores KV chunks by key. A chunk has no batch dimension.

    It is [num_layers, 2, num_tokens, num_kv_heads, head_size] in format "vllm" and [num_layers, 2,
    num_kv_heads, num_tokens, head_size] in format "huggingface".
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        """Set the device of retrieved chunks: "cpu", "cuda", "cuda:1", …

        Raises RuntimeError if ``dst_device`` is not a device.
        """
        torch.device(dst_device)  # raises RuntimeError
        self.dst_device = dst_device

    @abc.abstractmethod
    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Store one chunk. With ``blocking``, return when the chunk is stored."""

    @abc.abstractmethod
    def contains(self, key: CacheEngineKey) -> bool:
        """Return whether the chunk is stored."""

    @abc.abstractmethod
    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``, as a tensor that the caller owns, or None for a miss."""

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[CacheEngineKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """Put all chunks, and return their number. Without ``blocking``, some may not be stored yet."""
        num_chunks = 0
        for key, kv_chunk in keys_and_chunks:
            self.put(key, kv_chunk, blocking=blocking)
            num_chunks += 1
        return num_chunks

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield the chunk of each key in order, or None for a miss.

        Fetches each chunk when you ask for it.
        """
        for key in keys:
            yield self.get(key) if self.contains(key) else None

    @abc.abstractmethod
    def close(self) -> None:
        """End threads, and release memory and connections."""

    # The engine calls the following methods. The defaults work for every backend; a backend overrides them to
    # save copies or lookups. ``request`` identifies the prompt of the chunks. Its last chunk is evicted
    # first, because no chunk is usable without those before it.

    def prefix_length(self, keys: Keys) -> int:
        """Return the number of leading chunks that are stored; does not count as a use of them."""
        return sum(1 for _ in itertools.takewhile(self.contains, keys))

    def touch(self, keys: Keys, request: Hashable) -> None:  # noqa: B027 - optional
        """Mark the leading stored chunks as recently used. ``keys`` start at the prompt's first chunk."""

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """Yield the leading stored chunks, on any device. They are valid inside the ``with`` block only."""
        chunks: list[torch.Tensor] = []
        for chunk in self.batched_get(keys):
            if chunk is None:
                break
            chunks.append(chunk)
        yield chunks

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """Put chunks that are not one tensor yet, and return their number, as ``batched_put`` does.

        The caller may change the source tensors afterwards, with or without ``blocking``.
        """
        return self.batched_put(((key, source.to_tensor()) for key, source in chunks), blocking=blocking)
