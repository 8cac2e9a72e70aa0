"""Devices by name."""

from __future__ import annotations

import functools

import torch

from lmcache.logging import init_logger

logger = init_logger(__name__)


def usable_device(name: str) -> str:
    """Return ``name``, or "cpu" when it is a CUDA device and there is no CUDA.

    "cuda" becomes the current one: every thread has its own idea of that, and we have threads. Raises
    RuntimeError when ``name`` is no device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return name
    if not torch.cuda.is_available():
        _warn_once()
        return "cpu"
    return name if device.index is not None else f"cuda:{torch.cuda.current_device()}"


@functools.cache
def _warn_once() -> None:
    logger.warning("CUDA is not available: KV is kept on, and comes back on, the CPU")
