"""Sizes of the GPU measurements: on a GPU, and on the simulated driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama model."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for each token, with elements of two bytes."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True)
class Scale:
    copy_bytes: int = 256 << 20
    """Bytes of each measured batch of copies. ``max_pieces`` limits batches of small pieces."""
    max_pieces: int = 16384
    rounds: int = 7
    arena_bytes: int = 64 << 30
    """Bytes of the arena that is populated and pinned, if the host has them."""
    kernel_bytes: int = 256 << 20
    """Device memory that a run of the kernel reads, in about 0.1 ms."""
    kernel_runs: int = 2000
    shape: Shape = Shape(4096, 14336, 32, 32, 8, 128, 32000)
    """Shape of the models, by default that of Llama 3 8B with a smaller vocabulary."""
    chunk_tokens: int = 256
    prompt_tokens: tuple[int, ...] = (8192, 32768)
    """Tokens of the measured prompts."""
    is_tiny: bool = False
    """True for a quick run that only checks the program."""


TINY = Scale(4 << 20, 256, 2, 32 << 20, 1 << 20, 20, Shape(256, 512, 4, 4, 2, 64, 2000), 32, (64, 256), True)
"""Sizes for a quick run that only checks the program."""


def size(num_bytes: int) -> str:
    """Return a size in the largest unit that it fills."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << bits:
            return f"{num_bytes >> bits} {unit}"
    return f"{num_bytes >> 10} KiB"
