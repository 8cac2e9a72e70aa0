"""The vLLM connector: ``lmcache.engines.vllm.connector.LMCacheClusterConnector``.

``connector`` is the facade that vLLM loads; ``scheduler`` and ``worker`` are its halves, ``plan`` is
their pure core.
"""
