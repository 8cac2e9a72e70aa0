"""A real vLLM on a GPU, or on the emulated GPU of ``testing.vllm_gpu``: how to start it.

An engine process runs on a GPU if its environment has the variable ``LMCACHE_TEST_VLLM_GPU``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "LMCACHE_TEST_VLLM_GPU"
REAL, EMULATED = "real", "emulated"

BASE_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the V2 runner would import FlashInfer, which may be missing
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def environment_of(kind: str) -> dict[str, str]:
    """Environment variables of an engine on a GPU of this kind: REAL or EMULATED."""
    variables = {VARIABLE: kind, **BASE_ENVIRONMENT}
    return variables | {"TRITON_INTERPRET": "1"} if kind == EMULATED else variables


def engine_args(variables: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that an engine with this environment has by default. FlashAttention has no float32."""
    return {"dtype": "bfloat16", "block_size": 16} if VARIABLE in variables else {}


def prepare() -> None:
    """Prepare this process for an engine on a GPU, if its environment asks for one. Call it before vLLM is
    imported.
    """
    kind = os.environ.get(VARIABLE)
    if kind == EMULATED:
        from testing.vllm_gpu import emulation

        emulation.start(environment_of(kind))
    elif kind == REAL:
        _prepare_real()


def _prepare_real() -> None:
    """Run vLLM's wheel with an older torch than it pins, and without packages of other models."""
    import torch

    if not hasattr(torch.accelerator, "empty_host_cache"):  # newer than torch 2.11; called at shutdown
        torch.accelerator.empty_host_cache = lambda: None
    from vllm import platforms

    if not platforms.current_platform.is_cuda():  # no NVML here
        from vllm.platforms import cuda

        platforms._current_platform = cuda.NonNvmlCudaPlatform()
    if importlib.util.find_spec("torchvision") is None:
        from vllm.v1.worker import gpu_worker

        # It compiles kernels early, and imports models of images. Kernels are then compiled by first use.
        gpu_worker.kernel_warmup = lambda *_, **__: None
