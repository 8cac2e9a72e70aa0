"""The profile: the fields that injection adds to a user's pod. Pure.

The profile is derived from the cluster's own engine pod, so that both have one implementation. Injection does
not touch the pod's user, resources, ServiceAccount or other volumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.engine import resolved_images
from lmcache_operator.components.engine.features import FEATURES
from lmcache_operator.components.engine.gpus import CUDA_IPC, planned_transfer
from lmcache_operator.components.engine.kinds import KINDS
from lmcache_operator.components.engine.kinds.base import EngineKind
from lmcache_operator.components.engine.pod import MemorySize, pod_template
from lmcache_operator.contract.base import Context
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.objects import Mount, PodContainer

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
_ENV = ("LMCACHE_SOCKET", "PYTHONPATH")


def profile(cluster: Cluster, context: Context) -> Object:
    """A pod template with the additions to a pod: init containers, volumes and a group.

    Its containers have the arguments, variables and mounts to add to the engine's: one container for each
    kind of engine, in the order of ``KINDS``. So one cluster holds the settings for pods of all kinds. If the
    template has a claim, the sidecar shares the pod's own claims. Injected pods may lack features.

    Raises:
        InvalidSpecError: the spec can't be rendered.
    """
    for feature in FEATURES:
        cluster = replace(cluster, spec=feature.for_injected_pods(cluster.spec))
    transfer = planned_transfer(cluster, context.allow_all_gpus)
    images, size = resolved_images(cluster, context.images_for(cluster)), MemorySize(cluster.memory.num_bytes)
    whole = pod_template(cluster, images, "", transfer, size)["spec"]
    (engine,) = (container for container in whole["containers"] if container["name"] == names.ENGINE)
    used = names.SIDECAR, names.PAYLOAD
    added = [_init_container(container) for container in whole["initContainers"] if container["name"] in used]
    engines = [_engine(kind, engine, cluster) for kind in KINDS]
    mounted = {mount["name"] for container in (*added, *engines) for mount in container["volumeMounts"]}
    volumes = [*map(_volume, whole["volumes"]), {"name": _renamed(_NO_TOKEN), "emptyDir": {}}]
    spec: Object = {
        "containers": engines,
        "initContainers": added,
        "securityContext": {"supplementalGroups": [_GROUP]},
        "volumes": [volume for volume in volumes if volume["name"] in mounted],
    }
    if "resourceClaims" in whole and transfer.mode == CUDA_IPC:
        spec["resourceClaims"] = whole["resourceClaims"]
    annotations = {}
    for kind in KINDS:
        reserved = (f"{option} can't be set: {why}" for option, why in kind.reserved_by_injection.items())
        annotations[kind.reserved_annotation] = "\n".join(sorted(reserved))
    return {"metadata": {"annotations": annotations}, "spec": spec}


def _engine(kind: EngineKind, engine: PodContainer, cluster: Cluster) -> Object:
    """Additions to the container of an engine. ``engine``: the container of the cluster's own pods."""
    env = [variable for variable in engine["env"] if variable["name"] in _ENV]
    env += [{"name": name, "value": value} for name, value in kind.variables.items()]
    return {
        "args": kind.cache_args(cluster),
        "env": sorted(env, key=lambda variable: str(variable["name"])),
        "name": kind.name.lower(),
        "volumeMounts": _mounts(mount for mount in engine["volumeMounts"] if mount["mountPath"] in _SHARED),
    }


def _init_container(container: PodContainer) -> Object:
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


def _mounts(mounts: Iterable[Mount]) -> list[Mount]:
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
