"""Devices by name."""

from __future__ import annotations

import functools

import torch

from lmcache.logging import init_logger

_log = init_logger(__name__)


def usable_device(name: str) -> str:
    """Return ``name``, or "cpu" when it is a CUDA device and there is no CUDA.

    Raises RuntimeError when ``name`` is no device.
    """
    if torch.device(name).type != "cuda" or torch.cuda.is_available():
        return name
    _warn_once()
    return "cpu"


@functools.cache
def _warn_once() -> None:
    _log.warning("CUDA is not available: KV is kept on, and comes back on, the CPU")
