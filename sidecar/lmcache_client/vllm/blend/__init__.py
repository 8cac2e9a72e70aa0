"""CacheBlend in an unmodified vLLM: documents are reused at any position, and partly recomputed.

``scheduler`` claims prompts and orders the work. ``loads`` places stored KV in the request's blocks.
``blender`` selects tokens, and ``passes`` runs the engine's model over them, in ``start_load_kv``.
"""
