"""The storage core: keys, tiers in memory, on disk, in Redis and in other pods, and curves of hit ratios.

It knows no engine, no wire and no Kubernetes. The client in engines, the sidecar, the operator and the
library ``lmcache`` are built on it. ``keys`` names chunks and ``kv_groups`` says what a hit needs of each
KV group. ``tiers`` has all tiers, and ``curves`` estimates the hits of other sizes. ``causes`` and
``tenant_names`` are words that sidecar, operator and commands share, and ``explain`` prints tables of them.
``top`` runs the command of this name for the sidecar's command and for ``kubectl lmcache``. ``common`` has
helpers without a cache.

A key has four forms on its way from the engine to a medium:

- the engine's block hash
- the row key, 64 bytes: the namespace, and the chunk key that ``keys`` derives from the block hash
- the ``ObjectId``, a row key with its column
- the name in the medium, which ``tiers.remote.objects`` or ``tiers.disk.files`` derives
"""

__version__ = "0.1.0"
