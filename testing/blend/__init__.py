"""The proof that CacheBlend works: a little model that reads across documents, and what blending costs it."""
