"""Models of transformers that store the KV of prompts in an LMCacheEngine, and reuse it.

``CachedModel`` reuses the KV of a common prefix and generates exactly as the model does. ``BlendedModel``
reuses the KV of documents in any order (CacheBlend), which is approximate. Its pass inside the model is in
``blending``. ``prompts`` parses prompts as segments. The arithmetic is that of ``lmcache_client.blend``,
which the connector of vLLM uses, too.
"""

from lmcache.huggingface.blended import BlendedModel, Prefilled
from lmcache.huggingface.cached import CachedModel, metadata_of

__all__ = ["BlendedModel", "CachedModel", "Prefilled", "metadata_of"]
