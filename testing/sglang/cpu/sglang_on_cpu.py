"""HiCache for engines whose KV is in host memory, without CUDA and SGLang's kernels.

This is an SGLang plugin: SGLang calls ``register`` in each of its processes before it creates pools, because
``sglang_on_cpu-0.0.0.dist-info`` is next to this file and their folder is on ``PYTHONPATH``. Everything that
is not replaced here is SGLang's own code.

Runs with these stand-ins prove nothing about GPUs: copies end before they return, so that no test can observe
a copy that is still running, and page-locked memory, streams and the speed of copies are absent.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

_DIRECT_COPIES = "mha", "mla"
"""Modules of SGLang's host pools that use the copies of the io backend ``direct``."""


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between layers of one shape. Replaces ``sgl_kernel``'s ``transfer_kv_direct``, which copies
    whole pages with ``cudaMemcpyAsync``.
    """
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of host pages to the device's KV.

    Replaces ``transfer_kv_per_layer_direct_pf_lf``. Host pages are
    ``[pages, layers, tokens, heads, head_dim]``, and a layer on the device is ``[tokens, heads, head_dim]``.
    Indices are those of tokens, page by page.
    """
    pages = src_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *dst.shape[1:])


def store_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of the device's KV to host pages: the reverse of ``load_layer``.

    Replaces ``transfer_kv_all_layer_direct_lf_pf``. With keys and values, ``src_ptrs`` lists the keys of all
    layers and then the values of all layers.
    """
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for number, src in enumerate(src_ptrs):
        dst = dst_ptrs[number // num_layers]
        dst[pages, number % num_layers] = src[src_indices].reshape(len(pages), *dst.shape[2:])


def register() -> None:
    """Put the stand-ins in place."""
    import importlib

    from sglang.srt.mem_cache.pool_host import base

    # Page-locked memory needs a driver. SGLang would lock its host pages and some buffers.
    base.HostKVCache.pin_memory = property(_is_page_locked, _ignore)
    # SGLang leaves 10 GiB of memory free, which is more than a small machine has.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    for name in _DIRECT_COPIES:
        module: Any = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_per_layer_direct_pf_lf = load_layer
        module.transfer_kv_all_layer_direct_lf_pf = store_layers
    importlib.import_module("attention_of_new_tokens").register()
    # A copy of a fork server has the number of threads with which the fork server started.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))

    _use_gloo()
    _read_latents()
    _lock_no_tensors()


def _use_gloo() -> None:
    """Let ranks communicate through gloo. SGLang would use NCCL next to torch's own backend."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    initialize: Any = GroupCoordinator.__init__

    def initialize_without_nccl(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **{**kwargs, "use_pynccl": False})

    GroupCoordinator.__init__ = initialize_without_nccl


def _read_latents() -> None:
    """Let MLA models attend to the latents in the cache. By default, prompts need a GPU's kernels."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _lock_no_tensors() -> None:
    """Make tensors without page-locked memory. LoRA adapters ask for it."""

    def unlocked(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_unlocked(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return make(*args, **kwargs)

        return make_unlocked

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unlocked(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _is_page_locked(pool: Any) -> bool:
    return False


def _ignore(pool: Any, is_page_locked: bool) -> None:
    pass
