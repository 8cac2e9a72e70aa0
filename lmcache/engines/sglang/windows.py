"""Learns how many pages a sliding window of the model covers.

A hit needs the window's pages before its end, and the sidecar must know their number. SGLang does not tell
storage backends. Its radix cache knows the number, and uses it whenever it asks the storage for a prompt. So
the function that does this is wrapped, and the cache attaches at the first such prompt.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/components/swa.py``, ``SWAComponent.prepare_prefetch``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lmcache.engines.errors import UnsupportedError

logger = logging.getLogger(__name__)

_listeners: list[Callable[[int], object]] = []


def call_once(listener: Callable[[int], object]) -> None:
    """Call ``listener`` once with the pages of a window, on the scheduler's thread. It must not block.

    Raises UnsupportedError if SGLang lacks the expected class.
    """
    try:
        from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
    except ImportError as error:
        raise UnsupportedError(f"this version of SGLang has unknown sliding windows: {error}") from error
    function = getattr(SWAComponent, "prepare_prefetch", None)
    if function is None:
        raise UnsupportedError("this version of SGLang has no SWAComponent.prepare_prefetch")
    _listeners.append(listener)
    if not hasattr(function, "_lmcache_watched"):
        SWAComponent.prepare_prefetch = _watched(function)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(component: Any, *args: Any, **kwargs: Any) -> Any:
        while _listeners:
            try:
                _listeners.pop()(int(component.full_window_pages))
            except Exception:
                logger.exception("LMCache Cluster does not cache this engine")
        return function(component, *args, **kwargs)

    watched._lmcache_watched = True  # type: ignore[attr-defined]
    return watched
