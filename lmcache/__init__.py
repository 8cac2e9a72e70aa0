"""The API of LMCache 0.1-0.3 on this project's storage core, and an engine for transformers.

It has the name of LMCache's own package, so it is a distribution of its own, which replaces that package.
``cache_engine`` is the engine, with keys of ``prompt_keys``. ``storage_backend`` holds its chunks. ``server``
and ``protocol`` are the server for lm:// URLs. ``blend`` is CacheBlend, and ``huggingface`` uses engine and
CacheBlend in models of transformers.

Programs can rely on the API and the key format of LMCache 0.1-0.3. The caller owns the tensors that it gets.
If a medium fails, the chunk is a miss, and no exception is raised.
"""

from lmcache_store import __version__

__all__ = ["__version__"]
