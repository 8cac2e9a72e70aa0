"""The LMCache Cluster operator: turns LMCacheClusters into running, healthy engine pods.

``api`` is the resource. ``app`` watches objects and wakes the ``queue`` of clusters, ``election`` chooses one
of several operators, and ``reconcile`` handles one cluster. ``components`` renders its objects by the
``contract`` of a component, ``specs`` has names and merges, and ``pods`` plans the steps of pods.
``autoscaling`` collects samples of lookups, from which ``policy`` chooses sizes. ``stats`` asks sidecars,
``kube`` is the client of the API server, and ``manifests`` renders files without a cluster.

Users can rely on these promises:

- If several operators run, only the holder of the Lease writes (ADR 27).
- For an unchanged cluster, the operator writes only a heartbeat each minute, also after its own restart.
- The answers of sidecars change the status, and sizes within the declared bounds, but nothing else.
- Cached data survives any failure of the operator, and objects can be deleted while it is down.
"""

from __future__ import annotations

__version__ = "0.1.0"
DOCS = "https://github.com/lmcache-cluster/lmcache-cluster/blob/main/docs"
"""Folder of the documentation. No site is published."""
