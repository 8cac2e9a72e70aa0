"""transformers models whose prompts' KV is stored in, and retrieved from, an LMCacheEngine.

``CachedModel`` reuses the KV of a common prefix, and answers exactly. ``BlendedModel`` reuses the KV of
documents in any order (CacheBlend), and answers approximately.
"""

from lmcache.engines.huggingface.blended import BlendedModel, Prefilled
from lmcache.engines.huggingface.cached import CachedModel, metadata_of

__all__ = ["BlendedModel", "CachedModel", "Prefilled", "metadata_of"]
