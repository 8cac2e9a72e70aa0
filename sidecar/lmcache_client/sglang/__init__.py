"""The SGLang connector: ``lmcache_client.sglang.backend.LMCacheBackend``, a storage backend of HiCache.

``backend`` is the class that SGLang loads. ``attach`` and ``naming`` identify the engine's KV, ``pools``
copies SGLang's host pages, and ``weights`` notices weight updates. The engine-neutral parts are in
``lmcache_client.core``, mainly ``blocking``.
"""
