"""The storage core: keys, tiers in memory, on disk, in Redis and in other pods, and curves of hit ratios.

It knows no engine, no wire and no Kubernetes. The client in engines, the sidecar, the operator and the
library ``lmcache`` are built on it.
"""

__version__ = "0.1.0"
