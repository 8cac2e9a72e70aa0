"""CacheBlend: prompts reuse separately stored segments in any order, and recompute a part of their tokens."""
