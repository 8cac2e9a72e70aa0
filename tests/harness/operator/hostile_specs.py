"""Every field of an LMCacheCluster that reaches a pod, and what keeps its author from reaching more by it.

The fields come from the CRD's schema, so a new field fails a test until somebody has decided about it. The
name, labels, annotations and status are inputs as well: the lists below have their hostile values.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.harness.operator.spec_fuzz import SPEC_SCHEMA, STATUS_SCHEMA, any_value, value_of

Object = dict[str, Any]
ALLOWED_SECRET, ALLOWED_CLAIM, ALLOWED_PULL_SECRET = "allowed-secret", "allowed-claim", "allowed-pull-secret"
"""Names in the chart's lists, in tests of the policy."""
REFUSED = {
    "engine.podTemplate": "spec.engine.podTemplate: you may not",
    "sidecar.image": "spec.sidecar.image: you may not",
    "router.image": "spec.router.image: you may not",
    "engine.env[].valueFrom.configMapKeyRef": "spec.engine.env: you may not",
    "engine.env[].valueFrom.fileKeyRef": "spec.engine.env: you may not",
    "engine.env[].valueFrom.secretKeyRef": "Secret ",
    "images.pullSecrets": "spec.images.pullSecrets: you may not",
    "model.tokenSecretRef": "Secret ",
    "router.args": "spec.router.args: you may not",
    "model.volume": "spec.model.volume",
    "tenants.named[].saltSecretRef": "Secret ",
    "tiers.disk.encryption.secretRef": "Secret ",
    "tiers.peers.tls.secretRef": "Secret ",
    "tiers.remote.encryption.secretRef": "Secret ",
    "tiers.remote.external.authSecretRef": "Secret ",
    "tiers.remote.managed.tls.secretRef": "Secret ",
}
"""Fields that the admission policy refuses, with the fields below them, and the beginning of its message."""
_ADMITTED = {
    "a value that the schema limits": """
        autoscaling.memory autoscaling.mode autoscaling.prices autoscaling.remote engine.kind
        engine.blend engine.parallelism images.policy router.policy sidecar.chunkTokens
        sidecar.transfer tenants.default tenants.named[].memoryPercent tenants.named[].minMemoryPercent
        tenants.named[].name tenants.named[].priority tenants.named[].retainPercent tiers.admit
        tiers.memory.maxTtlSeconds tiers.memory.retainPercent
        tiers.peers.bytesPerSecond tiers.remote.managed.access
    """,
    "narrows who reaches pods of this LMCacheCluster: without it, everybody does": "clients",
    "a setting of a pod without a ServiceAccount token; names of variables for devices are refused": """
        engine.args engine.env[].name engine.env[].value engine.prefill.args
    """,
    "fields of the pod itself": "engine.env[].valueFrom.fieldRef",
    "resources of the pod itself": "engine.env[].valueFrom.resourceFieldRef",
    "an amount: a ResourceQuota limits it": """
        engine.gpu.count engine.prefill.gpu.count engine.prefill.replicas engine.prefill.resources
        engine.nodes engine.replicas engine.resources engine.sharedMemorySize router.replicas router.resources
        tenants.named[].lowerTierBytes tiers.memory.size tiers.remote.managed.memoryPerShard
        tiers.remote.managed.resources tiers.remote.managed.shards
    """,
    "devices: a ResourceQuota limits them": """
        engine.gpu.deviceClassName engine.gpu.resourceName engine.prefill.gpu.deviceClassName
        engine.prefill.gpu.resourceName
    """,
    "a RuntimeClass, which only an administrator can create": """
        engine.gpu.runtimeClassName engine.prefill.gpu.runtimeClassName
    """,
    "code in a pod without a ServiceAccount token: an engine's image is any code": "engine.image",
    "choice of nodes: a ResourceQuota and the scheduler limit it": """
        engine.nodeSelector engine.prefill.nodeSelector engine.prefill.tolerations engine.tolerations
        engine.topologyKey engine.topologySpreadConstraints tiers.remote.managed.nodeSelector
        tiers.remote.managed.tolerations
    """,
    "a PriorityClass: a ResourceQuota limits it": """
        engine.priorityClassName tiers.remote.managed.priorityClassName
    """,
    "a name that the engine's container reads": "model.name model.revision",
    "an empty volume": "model.volume.emptyDir",
    "content of an image, as with engine.image": "model.volume.image",
    "the operator replaces it": "model.volume.name",
    "a Secret with a random token for the sidecar's own pages": "sidecar.httpAuthentication",
    "code of this project in the engine": "engine.hintsRoute tenants.header",
    "a hash, from which no salt can be computed": "tenants.named[].saltHash",
    "a new volume: a ResourceQuota limits it": "tiers.disk.size",
    "the class of a new, empty volume": "tiers.disk.storageClassName",
    "another LMCacheCluster of the namespace, which the author may change anyway": """
        tiers.peers.clusterRef tiers.remote.clusterRef
    """,
    "a certificate for the operator's host names only, in a Secret with the uid in its name": """
        tiers.peers.tls.issuerRef tiers.remote.managed.tls.issuerRef
    """,
    "a server that gets KV of this cluster's pods, and of users' pods with its label: a documented limit": """
        tiers.remote.external.url
    """,
    "code in a pod without a ServiceAccount token, which mounts only the cluster's own Secrets": """
        tiers.remote.managed.image
    """,
}
"""Reasons why a field lets its author reach nothing more, and the fields."""
ADMITTED = {path: reason for reason, paths in _ADMITTED.items() for path in paths.split()}
"""Fields that the policy admits, and why."""


def fields() -> list[str]:
    """Paths of all fields below ``spec`` that have no fields themselves, such as ``engine.args[]``."""
    return list(_leaves(SPEC_SCHEMA, ""))


def entry_of(path: str) -> str | None:
    """The longest path in `REFUSED` and `ADMITTED` that contains this one; None: nobody has decided."""
    entries = [entry for entry in (*REFUSED, *ADMITTED) if _contains(entry, path)]
    return max(entries, key=len, default=None)


def spec_with(path: str) -> Object:
    """A spec that sets one field, and otherwise only what the schema requires.

    The object need not fit the CRD's rules between fields: another field may then refuse it.
    """
    spec: Object = _with(SPEC_SCHEMA, path.split("."), random.Random(path))
    spec.setdefault("tiers", {}).setdefault("memory", {"size": "1Gi"})
    spec.setdefault("model", {}).setdefault("name", "m")
    spec.setdefault("engine", {})
    if path.startswith("tiers.remote.encryption"):  # needs a remote tier
        spec["tiers"]["remote"]["external"] = {"url": "redis://h:1"}
    if path == "router.args[]":  # some arguments are admitted
        spec["router"]["args"] = ["--wasm-middleware=/models/x"]
    return spec


def _contains(entry: str, path: str) -> bool:
    return path == entry or path.startswith((f"{entry}.", f"{entry}[", f"{entry}{{"))


def _leaves(schema: Object, path: str) -> Iterator[str]:
    if "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array":
        yield from _leaves(schema["items"], f"{path}[]")
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from _leaves(schema["additionalProperties"], f"{path}{{}}")
    else:
        yield path


def _with(schema: Object, parts: list[str], rng: random.Random) -> Any:
    if not parts:
        return any_value(schema, "", rng)
    name = parts[0].rstrip("[]{}")
    is_list, is_map = parts[0].endswith("[]"), parts[0].endswith("{}")
    inner = schema["properties"][name]
    if is_list or is_map:
        inner = inner["items" if is_list else "additionalProperties"]
    if name == "name" and "x-kubernetes-validations" in inner:  # random words break the rule of names
        value: Any = "other"
    else:
        value = any_value(inner, name, rng) if len(parts) == 1 else _with(inner, parts[1:], rng)
    value = [value] if is_list else {"key": value} if is_map else value
    required = {key for key in schema.get("required", ()) if key != name}
    return {key: any_value(schema["properties"][key], key, rng) for key in sorted(required)} | {name: value}


FULL: Object = {
    "model": {"name": "m"},
    "engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}, "prefill": {}},
    "sidecar": {"httpAuthentication": "Token"},
    "router": {},
    "tiers": {
        "memory": {"size": "64Mi"},
        "peers": {},
        "remote": {"managed": {"memoryPerShard": "512Mi", "image": "attacker.example/shard:1"}},
    },
}
"""A spec that needs every component. Only certificates are missing: they need cert-manager."""
OF_AN_ISSUER: Object = {"tls": {"issuerRef": {"name": "any"}}}
"""Addition to peers and to a managed tier: cert-manager then writes a Secret."""
SECRETS = tuple(f"{{name}}-{purpose}" for purpose in ("pages", "peers", "peers-tls", "remote", "remote-tls"))
"""Names of Secrets that follow from the name of an LMCacheCluster alone. A pod must mount none of them."""
LABELS = {
    "app.kubernetes.io/managed-by": "lmcache-operator",
    "lmcache.io/cluster": "other", "lmcache.io/component": "engine", "lmcache.io/inject": "other",
    "lmcache.io/pages": "Token", "lmcache.io/peers": "other", "lmcache.io/scraper": "true",
}  # fmt: skip
"""Labels that mean something on other objects. On an LMCacheCluster they mean nothing."""
ANNOTATIONS = {
    "lmcache.io/default-images": '{"engine": "attacker.example/x:1", "sidecar": "attacker.example/x:1"}',
    "lmcache.io/events-for": "demo", "lmcache.io/lenders": '{"demo": "uid"}',
    "lmcache.io/memory-size": "1", "lmcache.io/rendered-hash": "0", "lmcache.io/shards": "9",
    "lmcache.io/spec-hash": "0",
}  # fmt: skip
"""Annotations that mean something on other objects, or on a cluster that the operator itself creates."""


def hostile_status(seed: int) -> Object:
    """A status that fits the schema. It names images of an attacker, and texts instead of figures.

    Users with rights on ``lmcacheclusters/status`` and on pods can write it.
    """
    status: Object = value_of(STATUS_SCHEMA, "status", random.Random(seed))
    status = {"autoscaling": {"memory": {"current": "no size"}}} | status
    return status | {"images": {"engine": "attacker.example/x:1", "sidecar": "attacker.example/x:1"}}


class HostilePod(NamedTuple):
    """A pod template that asks for more than a pod of the operator has."""

    field: str
    refused_by: str
    template: Object


OPERATOR, POD_SECURITY, RIGHTS = "operator", "Pod Security", "rights"
"""Parts that refuse a pod template of a user who may create pods. RIGHTS: the policy alone refuses it, and
only for users who may not create pods. A user with that right reaches the same with a StatefulSet."""


def _pod(field: str, refused_by: str, **spec: Any) -> HostilePod:
    return HostilePod(field, refused_by, {"spec": spec})


def _engine(field: str, refused_by: str, **container: Any) -> HostilePod:
    return _pod(f"containers[].{field}", refused_by, containers=[{"name": "engine", **container}])


def _secure(field: str, **context: Any) -> HostilePod:
    return _engine(f"securityContext.{field}", POD_SECURITY, securityContext=context)


def _volume(field: str, refused_by: str, source: Object) -> HostilePod:
    return _pod(f"volumes[].{field}", refused_by, volumes=[{"name": "x", **source}])


# The API server refuses privileged containers that may not escalate, before Pod Security sees the pod.
_PRIVILEGED = {"privileged": True, "allowPrivilegeEscalation": True}
_TOKEN = {"serviceAccountToken": {"path": "token"}}
_FROM_SECRET = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
HOSTILE_PODS = (
    _pod("hostNetwork", POD_SECURITY, hostNetwork=True),
    _pod("hostPID", POD_SECURITY, hostPID=True),
    _pod("hostIPC", POD_SECURITY, hostIPC=True),
    _pod("securityContext.runAsUser", POD_SECURITY, securityContext={"runAsUser": 0}),
    _pod("securityContext.runAsNonRoot", POD_SECURITY, securityContext={"runAsNonRoot": False}),
    _pod("securityContext.sysctls", POD_SECURITY,
         securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
    _pod("securityContext.seLinuxOptions", POD_SECURITY,
         securityContext={"seLinuxOptions": {"type": "spc_t"}}),
    _pod("securityContext.seccompProfile", POD_SECURITY,
         securityContext={"seccompProfile": {"type": "Unconfined"}}),
    _pod("securityContext.appArmorProfile", POD_SECURITY,
         securityContext={"appArmorProfile": {"type": "Unconfined"}}),
    _secure("privileged", **_PRIVILEGED),
    _secure("allowPrivilegeEscalation", allowPrivilegeEscalation=True),
    _secure("capabilities.add", capabilities={"add": ["NET_ADMIN"]}),
    _secure("runAsUser", runAsUser=0),
    _secure("seccompProfile", seccompProfile={"type": "Unconfined"}),
    _engine("ports[].hostPort", POD_SECURITY, ports=[{"containerPort": 9000, "hostPort": 9000}]),
    _volume("hostPath", POD_SECURITY, {"hostPath": {"path": "/"}}),
    _volume("nfs", POD_SECURITY, {"nfs": {"server": "h", "path": "/"}}),
    _volume("iscsi", POD_SECURITY, {"iscsi": {"targetPortal": "h", "iqn": "iqn.2026-01.x:y", "lun": 0}}),
    _pod("initContainers[].securityContext", POD_SECURITY,
         initContainers=[{"name": "sidecar", "securityContext": _PRIVILEGED}]),
    _pod("serviceAccountName", OPERATOR, serviceAccountName="other"),
    _pod("automountServiceAccountToken", OPERATOR, automountServiceAccountToken=True),
    _pod("initContainers[].image", OPERATOR, initContainers=[{"name": "sidecar", "image": "other:1"}]),
    _engine("env[].valueFrom.secretKeyRef", RIGHTS, env=[_FROM_SECRET]),
    _engine("envFrom[].secretRef", RIGHTS, envFrom=[{"secretRef": {"name": "s"}}]),
    _volume("secret", RIGHTS, {"secret": {"secretName": "s"}}),
    _volume("projected.sources[].serviceAccountToken", RIGHTS, {"projected": {"sources": [_TOKEN]}}),
    _volume("persistentVolumeClaim", RIGHTS, {"persistentVolumeClaim": {"claimName": "c"}}),
)  # fmt: skip
"""Pod templates by the field that makes them hostile."""
