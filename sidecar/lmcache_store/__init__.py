"""The storage core: keys, tiers in memory, on disk, in Redis and in other pods, and curves of hit ratios.

It knows no engine, no wire and no Kubernetes. The client in engines, the sidecar, the operator and the
library ``lmcache`` are built on it. ``keys`` names chunks and ``kv_groups`` says what a hit needs of each
KV group. ``causes`` and ``tenant_names`` are words that sidecar, operator and commands share. ``top`` runs
the command of this name for the sidecar's command and for ``kubectl lmcache``.
"""

__version__ = "0.1.0"
