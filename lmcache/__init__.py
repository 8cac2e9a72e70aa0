"""LMCache Cluster's library: cache engine, storage tiers, wire client and engine connectors."""

import sys
from pathlib import Path

from lmcache_store import __version__

__all__ = ["__version__"]

# In an engine's container this package is a folder on PYTHONPATH, and its dependencies are in a folder next
# to it (tools/payload.py). That folder goes last, so that it hides none of the engine's own packages.
_bundled = Path(__file__).parent.parent / "lmcache_bundled" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
if _bundled.is_dir() and str(_bundled) not in sys.path:
    sys.path.append(str(_bundled))
