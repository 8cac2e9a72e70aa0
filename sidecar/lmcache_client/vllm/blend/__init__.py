"""CacheBlend in an unmodified vLLM: documents are reused at any position, and partly recomputed.

``params`` reads what a request asks for. If it names no documents, ``known`` finds them by ``marks``.
``scheduler`` claims prompts and orders the work, and ``asked`` is its state. ``loads`` places stored KV in
the request's blocks.
``blender`` selects tokens, and ``passes`` runs the engine's model over them, in ``start_load_kv``.
"""
