"""The profile: the fields that injection adds to a user's pod. Pure.

The profile is derived from the cluster's own engine pod, so that both have one implementation. Injection does
not touch the pod's user, resources, ServiceAccount or other volumes.
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
"""Annotation: a line for each vLLM option that an injected pod must not set, with the reason."""
PREFIX = "lmcache-"
"""Prefix of injected containers and volumes, since a pod may already have a "config" or a "sidecar"."""
SIDECAR = f"{PREFIX}{names.SIDECAR}"
"""The container that marks a pod as injected."""
SIDECARS = (names.SIDECAR, SIDECAR)
"""Names of the sidecar's container, in engine pods and in pods with an injected cache."""
_GROUP = 2000
"""Group of the sidecar's image. It owns socket and arena, so the engine needs it as a supplemental group."""
_NO_TOKEN = "no-token"
_TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Path at which the API server mounts the ServiceAccount's token, unless another volume is mounted at it."""
_NAME_LENGTH = 63
"""Maximum length of a volume's name."""
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
    """A pod template with the additions to a pod: init containers, volumes and a group.

    Its one container has the arguments, variables and mounts to add to the engine's. If the cluster gets its
    GPUs through a claim, the template has that claim: it marks that the sidecar shares the pod's own claims.

    Raises:
        InvalidSpecError: the spec can't be rendered.
    """
    transfer = planned_transfer(cluster, context.allow_all_gpus)
    images, size = resolved_images(cluster, context.images), MemorySize(cluster.memory.num_bytes)
    whole = pod_template(cluster, images, "", transfer, size)["spec"]
    (engine,) = (container for container in whole["containers"] if container["name"] == names.ENGINE)
    # If the payload is an image volume, a container named "payload" is the user's own.
    used = {names.SIDECAR} if cluster.spec.sidecar.payload == IMAGE_VOLUME else {names.SIDECAR, names.PAYLOAD}
    added = [_init_container(container) for container in whole["initContainers"] if container["name"] in used]
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
    """An injected container, independent of the pod's settings. ``podTemplate`` may have removed fields."""
    resources, security = container.get("resources") or {}, container.get("securityContext") or {}
    renamed: Object = {key: value for key, value in container.items() if key not in _NOT_GIVEN} | {
        "name": f"{PREFIX}{container['name']}",
        "resources": {kind: amounts for kind, amounts in resources.items() if kind != "claims"},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **security},
        # An empty volume hides the token of the pod's ServiceAccount from the injected container.
        "volumeMounts": _mounts([*container["volumeMounts"], {"mountPath": _TOKEN_DIR, "name": _NO_TOKEN}]),
    }
    if container["name"] == names.SIDECAR:
        # The port gets a prefixed name, or selectors of ports by name would match it by mistake.
        metrics = next(port for port in container["ports"] if port["containerPort"] == names.SIDECAR_PORT)
        renamed["ports"] = [metrics | {"name": f"{PREFIX}metrics"}]
        # In users' pods, service links are enabled and could set this variable.
        renamed["env"] = [*container["env"], {"name": "LMCACHE_HTTP_PORT", "value": f"{names.SIDECAR_PORT}"}]
    return renamed


def _mounts(mounts: Iterable[Object]) -> list[Object]:
    return [mount | {"name": _renamed(mount["name"])} for mount in mounts if mount.get("name")]


def _renamed(volume: str) -> str:
    name = f"{PREFIX}{volume}"
    return name if len(name) <= _NAME_LENGTH else f"{PREFIX}{names.digest(volume)}"


def _volume(volume: Object) -> Object:
    """A volume with its prefixed name. ConfigMaps and Secrets are optional, so that a missing one does not
    keep the pod from starting."""
    renamed = volume | {"name": _renamed(volume["name"])}
    for source in ("configMap", "secret"):
        if isinstance(volume.get(source), dict):
            renamed[source] = volume[source] | {"optional": True}
    return renamed
