"""The LMCache Cluster operator: turns LMCacheClusters into running, healthy engine pods.

``api`` is the resource. ``app`` watches objects and wakes the ``queue`` of LMCacheClusters, ``election``
chooses one of several operators, and ``reconcile`` handles one LMCacheCluster. ``components`` renders its
objects, and ``contract`` says what each component must implement. ``specs`` names and merges objects, and
``pods`` says which pods are not ready, and plans which pods to replace or resize. ``autoscaling`` collects
samples of lookups, from which ``policy`` chooses sizes. ``stats`` asks sidecars, and ``kube`` is the client
of the API server. ``manifests`` reads LMCacheClusters and pods from files, without Kubernetes, and prints
the objects that the operator derives from them.

Users can rely on these promises:

- If several operators run, only the holder of the Lease writes (ADR 27).
- For an unchanged LMCacheCluster, the operator writes only a heartbeat each minute, also after its own
  restart.
- The answers of sidecars can change only the status, and sizes within the declared bounds.
- Cached data survives any failure of the operator, and objects can be deleted while it is down.
"""

from __future__ import annotations

__version__ = "0.1.0"
DOCS = "https://github.com/lmcache-cluster/lmcache-cluster/blob/main/docs"
"""Folder of the documentation. No site is published."""
