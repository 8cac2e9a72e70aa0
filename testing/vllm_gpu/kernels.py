"""Reference implementations of the kernels that vLLM's GPU runner launches for a Llama.

They replace vLLM's extension modules for CUDA. A call of any other operation fails with its name, because
the operation does not exist.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from testing.vllm_gpu import attention
from testing.vllm_gpu.device import NotEmulatedError

MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Extension modules of vLLM's wheel for GPUs. Importing them registers operations, and nothing else."""

_OPERATIONS: dict[str, Callable[..., Any]] = {}
_libraries: list[Any] = []  # their operations live as long as they do


def operation(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operation ``NAMESPACE::NAME(...) -> ...``."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATIONS[schema] = function
        return function

    return add


def emulate() -> None:
    """Define the operations and put empty modules in the place of the extension modules."""
    for name in MODULES:
        sys.modules[name] = types.ModuleType(name)
    library: Any = torch.library.Library
    by_namespace: dict[str, Any] = {}
    for schema, function in _OPERATIONS.items():
        namespace, _, signature = schema.partition("::")
        if namespace not in by_namespace:
            by_namespace[namespace] = library(namespace, "FRAGMENT")
        by_namespace[namespace].define(signature)
        key = "CPU" if "Tensor" in signature else "CompositeExplicitAutograd"
        by_namespace[namespace].impl(signature.partition("(")[0], function, key)
    _libraries.extend(by_namespace.values())


def _normalized(
    values: torch.Tensor, weight: torch.Tensor | None, epsilon: float, to: torch.dtype
) -> torch.Tensor:
    """RMS norm of float32 ``values`` over the last dimension."""
    scaled = (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)).to(to)
    return scaled if weight is None else scaled * weight


@operation("_C::rms_norm(Tensor(a!) out, Tensor input, Tensor? weight, float epsilon) -> ()")
def rms_norm(out: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    out.copy_(_normalized(values.float(), weight, epsilon, values.dtype))


@operation(
    "_C::fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()"
)
def fused_add_rms_norm(
    values: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    total = values.float() + residual.float()
    residual.copy_(total)
    values.copy_(_normalized(total, weight, epsilon, values.dtype))


@operation("_C::silu_and_mul(Tensor(a!) out, Tensor input) -> ()")
def silu_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
    gate, up = values.chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


@operation(
    "_C::rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    if not is_neox or rope_dim_offset or inverse:
        raise NotEmulatedError("rotary_embedding is emulated for whole heads in the style of NeoX only")
    cos, sin = cos_sin_cache[positions.flatten()][:, None].float().chunk(2, -1)
    size = 2 * cos.shape[-1]
    for vectors in (query, key):
        if vectors is not None:
            heads = vectors.view(positions.numel(), -1, head_size)
            first, second = heads[..., :size].float().chunk(2, -1)
            heads[..., :size] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@operation(
    "_C_cache_ops::reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write ``[tokens, heads, head_dim]`` into caches ``[blocks, block_size, heads, head_dim]``."""
    if kv_cache_dtype not in ("auto", "bfloat16"):
        raise NotEmulatedError(f"KV of type {kv_cache_dtype} is not emulated")
    is_real = slot_mapping >= 0  # padding has slot -1
    slots, size = slot_mapping[is_real], key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // size, slots % size] = new[: len(slot_mapping)][is_real]


@operation(
    "_vllm_fa3_C::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, "
    "int num_heads_q, int num_heads_kv, int headdim, int headdim_v, ScalarType qkv_dtype, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? cache_leftpad, int? page_size, int max_seqlen_k_new, bool causal, "
    "int window_left, int window_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) "
    "-> Tensor"
)
def get_scheduler_metadata(*_: object) -> torch.Tensor:
    """Plan of FlashAttention's work on the GPU, which the emulated kernel ignores."""
    return torch.zeros(8, dtype=torch.int32)


operation(attention.SCHEMA)(attention.fwd)
for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
):
    operation(f"_C::{_name}(int cuda_device_capability) -> bool")(lambda _: False)
