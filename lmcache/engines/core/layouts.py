"""From the engine's KV tensors to byte views of whole blocks, and names for what the bytes mean.

The cache moves whole blocks and never looks inside. So two engines can share if a block means the same to
both: the same content order (the attention backend's, on the CPU also the packing of its instruction set),
the same order of heads and tokens inside a block, the same data type and sizes. A *content id* says all of
that; the ids of all layers are part of the namespace. The order of layers and blocks in memory does not
matter: slots have their own (copier).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KNOWN_CONTENTS: Mapping[tuple[str, str], str] = {
    # Per block and head: K transposed [head_size, tokens], then V [tokens, head_size].
    ("CPU_ATTN", "vec"): "cpu-vec-1",
}
"""(attention backend, instruction set) -> id of a content order whose bytes a golden test pins.

The id of any other content holds the engine's version: its bytes are shared within one minor release only.
"""


class Unsupported(Exception):
    """This engine runs untouched, nothing is offered; the message is a sentence that says why."""


@dataclass(frozen=True)
class Layout:
    """One rank's KV as bytes: per layer uint8 ``[num_blocks, page_bytes]`` over the engine's own memory."""

    pages: tuple[torch.Tensor, ...]
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of this rank."""
        return self.blocks_per_chunk * sum(pages.shape[1] for pages in self.pages)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise Unsupported unless all KV is one group of plain full attention whose blocks can be shared."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(
            f"the model has {len(groups)} KV cache groups; one group of full attention can be cached"
        )
    group = groups[0]
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for spec in specs.values() if specs else [group.kv_cache_spec]:
        if type(spec).__name__ != "FullAttentionSpec":
            raise Unsupported(f"KV of kind {type(spec).__name__} can't be cached yet")
    if group.is_eagle_group or getattr(group, "host_resident", False):
        raise Unsupported("KV of draft layers and of host-resident groups can't be cached yet")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{name} > 1 is not supported yet")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise Unsupported(
            "sleep mode takes KV away without a word to the connector, also under a copy; "
            "start vLLM without --enable-sleep-mode to cache"
        )
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise Unsupported(
            'kv_load_failure_policy is not "recompute": a failed load would fail the request; '
            "set it in --kv-transfer-config"
        )


def check_stages(vllm_config: Any, layout: Layout) -> None:
    """Raise Unsupported when pipeline stages can't be told to agree: each rank sees only its own layers."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return
    if len({pages.shape[1] for pages in layout.pages}) != 1:
        raise Unsupported("with pipeline stages all layers must have blocks of one size")
    if getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        raise Unsupported("kv_cache_dtype_skip_layers can't be cached with pipeline stages")


def page_views(
    layers: Sequence[str], kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> list[torch.Tensor]:
    """View the layers, in their order, as uint8 ``[num_blocks, page_bytes]``; those that share KV count once.

    Raises Unsupported when a block is not one run of bytes.
    """
    views: dict[tuple[int, int], torch.Tensor] = {}
    for layer in layers:
        blocks = _by_block(kv_caches[layer], num_blocks)
        if not _is_dense(blocks):
            raise Unsupported(
                f"a block of {layer} is not one run of bytes (strides {tuple(blocks.stride())})"
            )
        item = blocks.element_size()
        page_bytes = blocks[0].numel() * item
        view = torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
            blocks.untyped_storage(),
            blocks.storage_offset() * item,
            (num_blocks, page_bytes),
            (blocks.stride(0) * item, 1),
        )
        views.setdefault((blocks.data_ptr(), blocks.stride(0)), view)
    return list(views.values())


def content_id(
    kv: torch.Tensor, num_blocks: int, backend: str, instruction_set: str, engine_version: str
) -> str:
    """Say what the bytes of a block of this layer mean; equal ids mean equal bytes for equal KV.

    ``kv`` is the engine's view ``[blocks, heads, tokens, content]``, in whatever physical order.
    """
    known = KNOWN_CONTENTS.get((backend, instruction_set))
    minor = ".".join(engine_version.split(".")[:2])
    content = known or f"{backend}-{instruction_set}@{minor}"
    blocks = _by_block(kv, num_blocks)
    # Physical order of the dimensions inside a block, outermost first; those of size 1 have no order.
    sizes, strides = blocks.shape[1:], blocks.stride()[1:]
    order = sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: -strides[dim])
    dtype = str(kv.dtype).removeprefix("torch.")
    return f"{content}/{dtype}/{'x'.join(map(str, sizes))}/{''.join(map(str, order))}"


def _by_block(kv: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Make the engine's blocks dimension 0: a backend may have split each into several kernel blocks."""
    return kv if kv.shape[0] == num_blocks else kv.view(num_blocks, -1, *kv.shape[1:])


def _is_dense(blocks: torch.Tensor) -> bool:
    inner = blocks[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(inner.shape, inner.stride(), strict=True))
    return extent == inner.numel()
