"""CacheBlend: reuse of KV that was stored apart and in another order, a part of its tokens recomputed."""
