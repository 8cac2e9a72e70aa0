"""What a pod of somebody else's needs to use a cluster's cache. Pure.

It is taken out of the cluster's own engine pod, so that there is one implementation of both. What belongs to
the pod stays its owner's: its user, its resources, its ServiceAccount, its other volumes.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import resolved_images
from lmcache_operator.components.engine.gpus import planned_transfer
from lmcache_operator.components.engine.pod import IMAGE_VOLUME, MemorySize, pod_template
from lmcache_operator.components.engine.vllm import RESERVED
from lmcache_operator.specs import Object, names, paths

RESERVED_ARGS = "lmcache.io/reserved-args"
"""Annotation: a line for each option that such a pod can't have, with the reason."""
PREFIX = "lmcache-"
"""Of containers and volumes: a pod may have a "config" or a "sidecar" of its own."""
SIDECAR = f"{PREFIX}{names.SIDECAR}"
"""The container by which a pod is known to have the cache."""
_GROUP = 2000
"""Of the sidecar's image. Socket and arena belong to it, so the engine is in it, whoever its user is."""
_NO_TOKEN = "no-token"
_TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where the API server mounts the ServiceAccount's token, unless something else is there already."""
_NAME_LENGTH = 63
"""Of a volume's name, at most."""
_NOT_GIVEN = ("ports", "volumeDevices")
_SHARED = (paths.ARENA_DIR, paths.PAYLOAD_DIR, paths.SOCKET_DIR)
_ENV = ("LMCACHE_SOCKET", "PYTHONHASHSEED", "PYTHONPATH")
_ARGS = ("--kv-transfer-config", "--prefix-caching-hash-algo")
ONE_POD = "an engine with a cache is one pod; for more engines run more pods"
_RESERVED = {
    **{
        option: RESERVED[option]
        for option in ("--", "--config", "--decode-context-parallel-size", "-dcp", "--ec-transfer-config",
                       "--enable-sleep-mode", "--kv-offloading-size", "--no-enable-prefix-caching", *_ARGS)
    },
    **dict.fromkeys(("--data-parallel-size", "--prefill-context-parallel-size", "-pcp"), ONE_POD),
    **dict.fromkeys(("--headless", "--nnodes", "-n", "--node-rank", "-r"), ONE_POD),
}  # fmt: skip


def profile(cluster: Cluster, context: Context) -> Object:
    """A pod template with what is added to a pod: init containers, volumes and a group.

    Its one container has the arguments, variables and mounts to add to the engine's. Where the cluster's GPUs
    come by a claim it has that, too, as a sign that the sidecar shares the pod's own.

    Raises:
        InvalidSpecError: the spec can't be rendered.
    """
    transfer = planned_transfer(cluster, context.allow_all_gpus)
    images, size = resolved_images(cluster, context.images), MemorySize(cluster.memory.num_bytes)
    whole = pod_template(cluster, images, "", transfer, size)["spec"]
    (engine,) = (container for container in whole["containers"] if container["name"] == names.ENGINE)
    # A "payload" of the user's own, where the payload is an image's volume, is not ours.
    own = (names.SIDECAR,) if cluster.spec.sidecar.payload == IMAGE_VOLUME else (names.SIDECAR, names.PAYLOAD)
    added = [_init_container(container) for container in whole["initContainers"] if container["name"] in own]
    engine = {
        "args": [arg for arg in engine["args"] if arg.partition("=")[0] in _ARGS],
        "env": [variable for variable in engine["env"] if variable["name"] in _ENV],
        "image": engine["image"],
        "name": names.ENGINE,
        "volumeMounts": _mounts(mount for mount in engine["volumeMounts"] if mount["mountPath"] in _SHARED),
    }
    mounted = {mount["name"] for container in (*added, engine) for mount in container["volumeMounts"]}
    volumes = [*map(_volume, whole["volumes"]), {"name": _renamed(_NO_TOKEN), "emptyDir": {}}]
    spec: Object = {
        "containers": [engine],
        "initContainers": added,
        "securityContext": {"supplementalGroups": [_GROUP]},
        "volumes": [volume for volume in volumes if volume["name"] in mounted],
    }
    if "resourceClaims" in whole:
        spec["resourceClaims"] = whole["resourceClaims"]
    lines = [f"{option} can't be set: {_RESERVED[option]}" for option in sorted(_RESERVED)]
    return {"metadata": {"annotations": {RESERVED_ARGS: "\n".join(lines)}}, "spec": spec}


def _init_container(container: Object) -> Object:
    """One of ours, that asks for nothing from the pod around it; the user may have taken fields out of it."""
    resources, security = container.get("resources") or {}, container.get("securityContext") or {}
    renamed: Object = {key: value for key, value in container.items() if key not in _NOT_GIVEN} | {
        "name": f"{PREFIX}{container['name']}",
        "resources": {kind: amounts for kind, amounts in resources.items() if kind != "claims"},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **security},
        # The pod's rights are none of ours.
        "volumeMounts": _mounts([*container["volumeMounts"], {"mountPath": _TOKEN_DIR, "name": _NO_TOKEN}]),
    }
    if container["name"] == names.SIDECAR:
        # The one that is ours: selectors of ports by name would find more than they look for.
        metrics = next(port for port in container["ports"] if port["containerPort"] == names.SIDECAR_PORT)
        renamed["ports"] = [metrics | {"name": f"{PREFIX}metrics"}]
        # Links to Services would look like it, and in other people's pods they are on.
        renamed["env"] = [*container["env"], {"name": "LMCACHE_HTTP_PORT", "value": f"{names.SIDECAR_PORT}"}]
    return renamed


def _mounts(mounts: Iterable[Object]) -> list[Object]:
    return [mount | {"name": _renamed(mount["name"])} for mount in mounts if mount.get("name")]


def _renamed(volume: str) -> str:
    name = f"{PREFIX}{volume}"
    return name if len(name) <= _NAME_LENGTH else f"{PREFIX}{names.digest(volume)}"


def _volume(volume: Object) -> Object:
    """The same volume; settings that are missing keep no pod from starting: its sidecar stays up instead."""
    renamed = volume | {"name": _renamed(volume["name"])}
    for source in ("configMap", "secret"):
        if isinstance(volume.get(source), dict):
            renamed[source] = volume[source] | {"optional": True}
    return renamed
