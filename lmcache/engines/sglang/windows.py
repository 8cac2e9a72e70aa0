"""Finds how many pages a sliding window of the model covers.

A hit needs the window's pages before its end, and the sidecar must know their number. SGLang does not pass it
to storage backends. Its radix cache has one component for windows, which knows the number, and which exists
before a backend is loaded.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/components/swa.py``, ``SWAComponent``.
"""

from __future__ import annotations

import gc

from lmcache.engines.errors import UnsupportedError


def window_pages() -> int:
    """Return the pages of a window. Searches all objects of the process, in about 0.1 s.

    Raises UnsupportedError if SGLang does not have exactly one such component.
    """
    try:
        from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
    except ImportError as error:
        raise UnsupportedError(f"this version of SGLang has unknown sliding windows: {error}") from error
    found = [component for component in gc.get_objects() if type(component) is SWAComponent]
    numbers = {getattr(component, "full_window_pages", 0) for component in found}
    if len(numbers) != 1 or not min(numbers):
        raise UnsupportedError("the size of this model's sliding windows is not known")
    return int(min(numbers))
