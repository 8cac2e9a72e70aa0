"""The vLLM connector: ``lmcache.engines.vllm.connector.LMCacheClusterConnector``.

``connector`` is the facade that vLLM loads. Its two sides are ``scheduler`` and ``engines.core.worker``. The
engine-neutral parts are in ``lmcache.engines.core``.
"""
