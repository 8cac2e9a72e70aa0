"""Chooses the copier that fits the engine's memory."""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_client.core.copier import CpuCopier, EngineCopier, allowed_cores
from lmcache_client.core.cuda_copier import CudaCopier
from lmcache_client.core.layout import Layout
from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.errors import CudaUnavailableError


def make_copier(layouts: Mapping[int, Layout], num_threads: int | None = None) -> EngineCopier:
    """Create the copier for the memory in which the CUDA driver finds the KV.

    ``layouts``: by KV group; ``num_threads``: threads of a load in host memory, by default 2 if there is more
    than one core.

    On a GPU, the calling thread must not be one that captures CUDA graphs. Raises ValueError if no copier
    fits.
    """
    pages = next(iter(layouts.values())).pages[0]
    try:
        device = Device.of(pages.data_ptr())
    except CudaUnavailableError as error:
        if pages.device.type == "cuda":
            raise ValueError(f"the KV is on a GPU that can't be used: {error}") from error
        device = None
    if device is not None:
        device.driver.allow_calls_during_captures()
        return CudaCopier(layouts, device)
    if pages.device.type == "cpu":
        return CpuCopier(layouts, num_threads or min(2, len(allowed_cores())))
    raise ValueError(f"KV on a {pages.device.type} device is not supported: only host memory and CUDA are")
