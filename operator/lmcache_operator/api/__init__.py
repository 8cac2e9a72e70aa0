"""The LMCacheCluster resource: typed spec and status, the CRDs, and the parser.

``types`` is the typed source; ``tiers``, ``autoscaling``, ``engine_pods``, ``tenants``, ``router``,
``clients`` and ``images`` are parts of it. ``fields`` declares a field, ``crd`` writes the definitions, and
``parse`` turns an object into a `Cluster`. ``engine_kinds`` lists the engines with versions, images and
rules. ``documents`` reads YAML as kubectl reads it.

The API server refuses each mistake that the rules of the CRD can check. Each other mistake becomes a
condition that names the remedy.
"""

from __future__ import annotations

GROUP = "lmcache.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LMCacheCluster"
PLURAL = "lmcacheclusters"
PROFILE_KIND = "LMCacheProfile"
PROFILE_PLURAL = "lmcacheprofiles"
HEARTBEAT = "lastHeartbeatTime"
"""Field of the status with the time at which an operator last confirmed it."""
