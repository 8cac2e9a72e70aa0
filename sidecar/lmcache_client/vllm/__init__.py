"""The vLLM connector: ``lmcache_client.vllm.connector.LMCacheClusterConnector``.

``connector`` is the facade that vLLM loads. Its two sides are ``scheduler`` and ``core.worker``. The
engine-neutral parts are in ``lmcache_client.core``.
"""
