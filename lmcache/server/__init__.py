"""The library's own remote store: ``python -m lmcache.server host port [storage]``, reached by lm://."""

from lmcache.server.server import LMCacheServer

__all__ = ["LMCacheServer"]
