"""The storage core: keys, tiers in memory, on disk, in Redis and in other pods, and curves of hit ratios.

It knows neither engines, nor the protocol between engine and sidecar, nor Kubernetes. The client in
engines, the sidecar, the operator and the library ``lmcache`` are built on it. ``keys`` names chunks and
``kv_groups`` says what a hit needs of each KV group. ``tiers`` has all tiers, and ``curves`` estimates how
many hits a cache of another size would have. ``causes`` says where prompt tokens came from, and
``tenant_names`` has the rules for names of tenants. Sidecar, operator and commands share ``causes`` and
``tenant_names``, and ``explain`` prints tables of causes. ``top`` is the command ``top`` of the sidecar and
of ``kubectl lmcache``. ``common`` has helpers that do not depend on the cache.

A key has four forms on its way from the engine to a medium:

- the engine's block hash
- the row key, 64 bytes: the namespace, and the chunk key that ``keys`` derives from the block hash
- the ``ObjectId``, a row key with a column, which is one rank's part of the row
- the name in the medium, which ``tiers.remote.objects`` or ``tiers.disk.files`` derives
"""

__version__ = "0.1.0"
