"""What every storage backend of the library is."""

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

    [num_layers, 2, num_tokens, num_kv_heads, head_size] in format "vllm", [num_layers, 2, num_kv_heads,
    num_tokens, head_size] in format "huggingface".
    """

    def __init__(self, dst_device: str = "cuda") -> None:
        """Take the device that retrieved chunks shall be on: "cpu", "cuda", "cuda:1", …

        Raises RuntimeError when it names none.
        """
        torch.device(dst_device)  # raises
        self.dst_device = dst_device

    @abc.abstractmethod
    def put(self, key: CacheEngineKey, kv_chunk: torch.Tensor, blocking: bool = True) -> None:
        """Store one chunk; ``blocking``: return only when that is done."""

    @abc.abstractmethod
    def contains(self, key: CacheEngineKey) -> bool:
        """Is the chunk here?"""

    @abc.abstractmethod
    def get(self, key: CacheEngineKey) -> torch.Tensor | None:
        """Return the chunk on ``dst_device``, as a tensor of the caller's own; None: a miss."""

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[CacheEngineKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """Put each, and return how many were put (issued, that is, when not ``blocking``)."""
        num_chunks = 0
        for key, kv_chunk in keys_and_chunks:
            self.put(key, kv_chunk, blocking=blocking)
            num_chunks += 1
        return num_chunks

    def batched_get(self, keys: Iterable[CacheEngineKey]) -> Iterable[torch.Tensor | None]:
        """Yield one answer per key, in their order, each fetched only when it is asked for; None: a miss."""
        for key in keys:
            yield self.get(key) if self.contains(key) else None

    @abc.abstractmethod
    def close(self) -> None:
        """End threads, give back memory and connections."""

    # What the engine calls. A backend needs to do nothing for it; one that can spare a copy or a look
    # overrides them. ``request`` names the prompt whose chunks these are: of those the last goes first, since
    # none is of use without those before it.

    def prefix_length(self, keys: Keys) -> int:
        """Return how many leading chunks are here; does not count as using them."""
        return sum(1 for _ in itertools.takewhile(self.contains, keys))

    def touch(self, keys: Keys, request: Hashable) -> None:  # noqa: B027 - for one that orders its chunks
        """``keys`` begin at the prompt's head: the leading ones that are here are used."""

    @contextlib.contextmanager
    def prefix(self, keys: Keys, request: Hashable = None) -> Iterator[list[torch.Tensor]]:
        """Give the leading chunks that are here, to be read inside the ``with`` block only, on any device."""
        chunks: list[torch.Tensor] = []
        for chunk in self.batched_get(keys):
            if chunk is None:
                break
            chunks.append(chunk)
        yield chunks

    def put_chunks(self, chunks: Chunks, blocking: bool = True, request: Hashable = None) -> int:
        """Put chunks that are not one tensor yet, and return how many, as ``batched_put`` does.

        The caller may change what they come from afterwards, whether ``blocking`` or not.
        """
        return self.batched_put(((key, source.to_tensor()) for key, source in chunks), blocking=blocking)
