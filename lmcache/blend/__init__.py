"""CacheBlend: prompts reuse separately stored segments in any order, and recompute a part of their tokens.

``selection`` chooses the tokens to recompute, ``retriever`` joins the stored segments, and ``executor``
recomputes layer by layer. ``interfaces`` has the types that LMCache 0.1 documents.
"""
