"""Where things that take minutes to make are kept between runs and checkouts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$LMCACHE_CACHE_DIR``, or ``lmcache-cluster`` in the user's cache directory, as in setup.sh."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache-cluster"
    return Path(os.environ.get("LMCACHE_CACHE_DIR") or default)
