"""Finds how many pages a sliding window of the model covers.

A hit needs the window's pages before its end, and the sidecar must know their number. SGLang does not pass it
to storage backends. Its radix cache has one component for windows, which knows the number, and which exists
before a backend is loaded. The radix cache calls the functions that load a backend.

Source: SGLang 0.5.23, ``mem_cache/unified_cache/components/swa.py``, ``SWAComponent``.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from lmcache_client.errors import UnsupportedError

_pages: set[int] = set()
"""Pages of a window in the radix cache of this process, which has one model."""


def note_radix_cache() -> None:
    """Remember the window of the radix cache that loads the backend. Call this in a method of the backend.

    The garbage collector can't find the radix cache: SGLang hides its objects from it after the start.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        for owner in (caller, _field(caller, "tree_cache")):
            components = _field(owner, "components")
            if isinstance(components, dict):
                _pages.update(
                    filter(None, (_field(part, "full_window_pages") for part in components.values()))
                )
        frame = frame.f_back


def _field(owner: object, name: str) -> Any:
    """Return a field of an object, or None. Runs no code of the object, which may raise any error."""
    return getattr(owner, "__dict__", {}).get(name)


def window_pages() -> int:
    """Return the pages of a window.

    Raises UnsupportedError if SGLang's radix cache does not have exactly one size of windows.
    """
    if len(_pages) != 1:
        raise UnsupportedError("the size of this model's sliding windows is not known")
    return min(_pages)
