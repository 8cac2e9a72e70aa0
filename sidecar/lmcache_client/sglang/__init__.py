"""The SGLang connector: ``lmcache_client.sglang.backend.LMCacheBackend``, a storage backend of HiCache.

``backend`` is the class that SGLang loads. ``attach``, ``naming``, ``options`` and ``ranks`` identify the
engine's KV, ``pools`` copies SGLang's host pages, and ``weights`` notices weight updates. ``adapters`` keeps
requests of LoRA adapters apart. ``requests`` and ``windows`` find out what SGLang does not pass to backends.
The engine-neutral parts are in ``lmcache_client.core``, mainly ``paged``.
"""
