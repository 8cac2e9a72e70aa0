"""KV and staging blocks of an engine that computes on the CPU, in memory of the simulated GPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from lmcache_client.cuda.driver import Device, GpuContext
from testing.engine import gpu


def zeros(context: GpuContext, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in device memory, which is never freed."""
    address = int(context.call("cuMemAlloc", num_bytes))
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_().view(dtype)


@contextlib.contextmanager
def kv_in_device_memory() -> Iterator[None]:
    """On a simulated node, engines that are created in this context have their KV in device memory."""
    if "CUDASIM_NODE" not in os.environ:
        yield
        return
    from lmcache_client.vllm.blend import blender

    with contextlib.ExitStack() as patches:
        patches.enter_context(_on_device(blender, "_make_staging"))
        for module in _runners():
            patches.enter_context(_on_device(module, "allocate_kv_cache"))
        yield


def _on_device(module: ModuleType, name: str) -> contextlib.AbstractContextManager[object]:
    """Let a function of a module make its tensors in device memory."""
    allocate = getattr(module, name)

    def allocate_on_device(*args: object, **kwargs: object) -> Any:
        context = Device.visible()[0].primary_context()

        def device_zeros(*shape: int, dtype: torch.dtype, device: object) -> torch.Tensor:
            return zeros(context, math.prod(shape) * dtype.itemsize, dtype).view(shape)

        with mock.patch.object(torch, "zeros", device_zeros):
            return allocate(*args, **kwargs)

    return mock.patch.object(module, name, allocate_on_device)


def _runners() -> list[ModuleType]:
    """The modules of vLLM that allocate KV."""
    from vllm.v1.worker import gpu_model_runner

    if gpu.VARIABLE not in os.environ:
        return [gpu_model_runner]
    from vllm.v1.worker.gpu import attn_utils

    return [gpu_model_runner, attn_utils]
