"""The LMCache Cluster operator: turns LMCacheClusters into running, healthy engine pods.

``app`` watches objects and wakes the ``queue`` of clusters, ``election`` chooses one of several operators,
and ``reconcile`` handles one cluster. ``components`` renders its objects. ``stats`` asks sidecars, ``kube``
is the client of the API server. ``manifests`` renders files without a cluster.
"""

from __future__ import annotations

__version__ = "0.1.0"
