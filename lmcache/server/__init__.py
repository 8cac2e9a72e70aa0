"""The library's own remote store, for lm:// URLs. Start it with ``python -m lmcache.server host port``."""

from lmcache.server.server import LMCacheServer

__all__ = ["LMCacheServer"]
