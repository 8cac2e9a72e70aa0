"""Sizes of the step ``vllm``: the largest that GPU and host can hold."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.scale import Scale, Shape
from benchmarks.gpu.shared_files import free_bytes
from lmcache_client.cuda.driver import Device

_ACTIVATION_BYTES = 6 << 30
"""GPU memory for contexts, activations and workspaces."""
PROCESS_BYTES = 8 << 30
"""Host memory for engine, sidecars and Redis, besides arenas and weights."""


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    prompts: tuple[int, ...]
    """Tokens of the prompts. One more than whole chunks, so that a hit computes one token."""
    kv_bytes: int
    """KV of the engine."""
    memory_bytes: int
    """Memory tier of the sidecar. It holds all prompts until the engine's restart: those that are hit, those
    that arrive during decoding, and the first prompt of each engine."""
    other_memory_bytes: int
    """Memory tier of the other pod."""
    streams: int
    """Requests that decode at the same time."""
    stream_tokens: int
    """Tokens that each stream decodes: with its prompt less than a chunk, so that it stores nothing."""
    stored_prompts: int
    """Prompts that arrive while the streams decode."""
    rounds: int
    """Runs of each measurement of decoding."""
    restarts: int
    """Restarts of the engine."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights in bfloat16, at most."""
        shape = self.shape
        layer = shape.hidden * (4 * shape.heads * shape.head_size + 3 * shape.mlp)
        return 2 * (shape.layers * layer + 2 * shape.vocab * shape.hidden)


def of_this_machine(scale: Scale) -> Sizes:
    """Return the sizes for the first GPU and this host."""
    device = Device.visible()[0]
    gpu_bytes = int(device.driver.call("cuDeviceTotalMem", device.ordinal))
    return choose(scale, gpu_bytes, free_bytes(PROCESS_BYTES))


def choose(scale: Scale, gpu_bytes: int, shared_bytes: int) -> Sizes:
    """Return the sizes for a GPU with ``gpu_bytes``, and a host that has ``shared_bytes`` free for arenas."""
    if scale.is_tiny:
        return Sizes(scale.shape, (257, 513), 16 << 20, 64 << 20, 64 << 20, 2, 24, 1, 1, 3)
    prompts = (8193, 8193, 32769)
    large = Sizes(scale.shape, prompts, 12 << 30, 16 << 30, 10 << 30, 8, 180, 3, 2, 1)
    is_on_gpu = large.weight_bytes + large.kv_bytes + _ACTIVATION_BYTES < gpu_bytes
    if is_on_gpu and large.memory_bytes + large.other_memory_bytes < shared_bytes:
        return large
    shape = Shape(2048, 8192, 16, 16, 8, 128, 32000)  # 1B: half the KV of each token
    return Sizes(shape, prompts, 6 << 30, 8 << 30, 5 << 30, 8, 180, 3, 2, 1)
