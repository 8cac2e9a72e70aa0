"""The vLLM connector: ``lmcache.engines.vllm.connector.LMCacheClusterConnector``.

``connector`` is the facade that vLLM loads; ``scheduler`` and ``worker`` are its two sides. What knows no
engine is in ``lmcache.engines.core``.
"""
