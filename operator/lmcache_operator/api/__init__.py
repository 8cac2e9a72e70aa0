"""The LMCacheCluster resource: typed spec and status, the CRDs, and the parser."""

from __future__ import annotations

GROUP = "lmcache.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LMCacheCluster"
PLURAL = "lmcacheclusters"
PROFILE_KIND = "LMCacheProfile"
PROFILE_PLURAL = "lmcacheprofiles"
