"""Fields of the spec that a problem of a pod comes from. Pure."""

from __future__ import annotations

import re

from lmcache_operator.contract.base import Observed
from lmcache_operator.specs.merge import dig

_MISSING = re.compile(r'\b(secret|configmap|persistentvolumeclaim) "([^"]+)" not found')
_REFERENCES = {
    "secret": (
        "spec.model.tokenSecretRef.name", "spec.model.volume.secret.secretName",
        "spec.tiers.remote.external.authSecretRef.name", "spec.tiers.remote.managed.tls.secretRef.name",
    ),
    "configmap": ("spec.model.volume.configMap.name",),
    "persistentvolumeclaim": ("spec.model.volume.persistentVolumeClaim.claimName",),
}  # fmt: skip
"""Fields that name an object without which a pod does not start. Other objects may be missing."""
_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim"}


def missing_object(message: str, observed: Observed) -> str:
    """Advice on a missing object that a field names; empty: ``message`` is about no such object."""
    for kind, name in _MISSING.findall(message):
        fields = [path for path in _REFERENCES[kind] if dig(observed.resource, *path.split(".")) == name]
        if fields:
            where = f"does not exist in namespace {observed.resource['metadata']['namespace']}"
            return f"{_KINDS[kind]} {name} ({', '.join(fields)}) {where}: create it, or correct the name"
    return ""
