"""The library's own remote store, for lm:// URLs. Start it with ``python -m lmcache.server host port``.

``server_storage_backend`` stores its chunks.
"""

from lmcache.server.server import LMCacheServer

__all__ = ["LMCacheServer"]
