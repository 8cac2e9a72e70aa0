"""Fields of the spec that a problem of a pod comes from. Pure."""

from __future__ import annotations

import re

from lmcache_operator.contract.base import Observed
from lmcache_operator.specs import Object, names
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
_IMAGES = {
    (names.ENGINE, names.ENGINE): "spec.engine.image",
    (names.ENGINE, names.PAYLOAD): "spec.sidecar.image",
    (names.ENGINE, names.SIDECAR): "spec.sidecar.image",
    (names.REMOTE, names.REMOTE): "spec.tiers.remote.managed.image",
    (names.ROUTER, names.ROUTER): "spec.router.image",
}
"""Fields with the images of containers, by component and container."""
_NO_MODEL = re.compile(
    "HFValidationError|Invalid repository ID|RepositoryNotFoundError|is not a valid model identifier"
)
"""Output of vLLM and SGLang for a model that does not exist."""
_DENSE = "Non-MoE models do not support external data parallel mode"
"""Output of vLLM for an engine over several nodes that has only one data-parallel rank on each."""


def image_field(pod: Object, container: str) -> str:
    """The field with a container's image, in brackets; empty: no field of the spec sets it."""
    component = (pod["metadata"].get("labels") or {}).get(names.COMPONENT_LABEL, "")
    field = _IMAGES.get((component, container))
    return f" ({field})" if field else ""


def model_field(output: str, observed: Observed) -> str:
    """The field to correct, in brackets; empty: the output is not about a missing or unfit model."""
    if _DENSE in output:
        return " (spec.engine.parallelism.data: set 1 for a dense model, or replicas instead of nodes)"
    model = dig(observed.resource, "spec", "model", "name")
    return f" (spec.model.name is {model})" if model and _NO_MODEL.search(output) else ""


def missing_object(message: str, observed: Observed) -> str:
    """Advice on a missing object that a field names; empty: ``message`` is about no such object."""
    for kind, name in _MISSING.findall(message):
        fields = [path for path in _REFERENCES[kind] if dig(observed.resource, *path.split(".")) == name]
        if fields:
            where = f"does not exist in namespace {observed.resource['metadata']['namespace']}"
            return f"{_KINDS[kind]} {name} ({', '.join(fields)}) {where}: create it, or correct the name"
    return ""
