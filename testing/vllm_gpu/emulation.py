"""Start the emulation in a process, before it imports vLLM."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from testing.vllm_gpu import device, kernels, tensors

_is_started = False


def start(environment: Mapping[str, str]) -> None:
    """Emulate a GPU in this process, with further environment variables. Further calls do nothing."""
    global _is_started
    if _is_started:
        return
    _is_started = True
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already: it has chosen its platform")
    os.environ.update(environment)
    torch.set_num_threads(1)
    device.emulate()
    tensors.emulate()
    kernels.emulate()
    _choose_platform()
    _replace_functions()


def _choose_platform() -> None:
    """Make vLLM's platform the one for CUDA without NVML, and Triton usable."""
    backends: Any = importlib.import_module("triton.backends").backends
    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _: False  # the name of the CPU's wheel has "cpu"
    from vllm.platforms import cuda

    cuda.CudaPlatformBase.dispatch_key = "CPU"
    cuda.CudaPlatformBase.dist_backend = "gloo"
    platforms._current_platform = cuda.NonNvmlCudaPlatform()


def _replace_functions() -> None:
    """Replace functions that need a real GPU."""
    from vllm.utils import torch_utils
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_model_runner, gpu_worker
    from vllm.v1.worker.gpu import buffer_utils, model_runner

    for runner in (model_runner.GPUModelRunner, gpu_model_runner.GPUModelRunner):
        _put_on_cpu(runner)
    gpu_worker.kernel_warmup = lambda *_, **__: None  # compiles kernels of all models

    for module in (torch_utils, buffer_utils):
        module.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    # Triton's interpreter can't run this kernel: it calls a method of a plain int.
    on_cpu = topk_topp_sampler.apply_top_k_top_p_pytorch
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: on_cpu(logits, k, p)


def _put_on_cpu(runner: Any) -> None:
    """Let a runner compare devices of tensors with the device on which they are."""
    init = runner.__init__

    def init_on_cpu(self: Any, vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, tensors.on_cpu(device), *args, **kwargs)

    runner.__init__ = init_on_cpu
