"""The vLLM connector: ``lmcache_client.vllm.connector.LMCacheClusterConnector``.

``connector`` is the facade that vLLM loads. Its two sides are ``scheduler`` and ``core.worker``. The
engine-neutral parts are in ``lmcache_client.core``. ``attach``, ``groups``, ``layouts``, ``fingerprint``
and ``extra_keys`` identify the engine's KV. ``events`` and ``stats`` report to vLLM, and ``support`` lists
its versions. ``blend`` reuses documents at any position (CacheBlend). ``hand_over`` is for prefill engines.
``hints``, ``hinted`` and ``hints_route`` are for KV hints. ``router_discovery`` is for routers,
``tenant_header`` for gateways, and ``asgi`` for all middlewares.
"""
