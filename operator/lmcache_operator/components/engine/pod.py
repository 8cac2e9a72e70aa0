"""The engine pod: the sidecar, the payload that carries the client into the engine's image, and the engine.

The sidecar comes first and has no startup gate: it listens at once and populates its memory in the
background, so neither a slow nor a broken cache keeps an engine from starting. For the same reason it has no
readiness probe. The kubelet still counts it: a pod whose sidecar does not run is not Ready. So a sidecar that
can't use its configuration stays up, and everything it could trip over is refused before it is rendered.

A pod that goes: for a few seconds it serves on, until Services and proxies have noticed; then the engine
finishes the requests it has; when it has ended, the sidecar writes out what is queued.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from lmcache.units import format_mebibytes
from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import DiskTier
from lmcache_operator.components.engine.gpus import (
    CLAIM,
    CUDA_IPC,
    Transfer,
    engine_resources,
    has_claim,
    pod_claims,
    sidecar_env,
)
from lmcache_operator.components.engine.template import (
    SHM,
    declared_template,
    of_container,
    with_template,
)
from lmcache_operator.components.engine.vllm import (
    SHUTDOWN_TIMEOUT,
    SSL_CERTIFICATE,
    engine_args,
    int_option,
    option,
)
from lmcache_operator.components.resize import MAX_SIZE, SIZE_ARGUMENT, SIZE_FILE, sidecar_memory
from lmcache_operator.specs import Images, Object, names, paths
from lmcache_operator.specs.merge import at

# The uid of the stock engine image. Both containers have it: socket, locks and arena belong to one user.
_UID = 2000
_POD_SECURITY = {
    "fsGroup": _UID, "fsGroupChangePolicy": "OnRootMismatch", "runAsGroup": _UID, "runAsNonRoot": True,
    "runAsUser": _UID, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
IMAGE_VOLUME = "ImageVolume"
DISK_SIZE = "LMCACHE_DISK_SIZE"
_NOTICE_SECONDS = 5
_SHUTDOWN_SECONDS = 60
_WRITE_OUT_SECONDS = 55
"""For the end of the engine's processes, and then for the sidecar's queue (20 s)."""
# What hangs ends nothing in order: without this the kubelet would wait for it as long as for a pod that goes.
_HUNG = {"terminationGracePeriodSeconds": 10}


class MemorySize(NamedTuple):
    """Bytes of a pod's memory tier."""

    num_bytes: int
    """When it is made."""
    max_bytes: int | None = None
    """What it may grow to while it runs; None: its size does not change."""


def pod_template(
    cluster: Cluster, images: Images, spec_hash: str, transfer: Transfer, size: MemorySize
) -> Object:
    """The template of the StatefulSet, with what the user says of pods merged in.

    Raises:
        InvalidSpecError: what the user says breaks what the cache needs.
    """
    annotations = {names.SPEC_HASH: spec_hash, "kubectl.kubernetes.io/default-container": names.ENGINE}
    if size.max_bytes is not None:
        annotations[names.MEMORY_SIZE] = f"{size.num_bytes}"
    metadata = {"annotations": annotations, "labels": names.labels(cluster, names.ENGINE)}
    base = {"metadata": metadata, "spec": _pod_spec(cluster, images, transfer, size)}
    return with_template(base, cluster)


def _pod_spec(cluster: Cluster, images: Images, transfer: Transfer, size: MemorySize) -> Object:
    sidecar_image = images[names.SIDECAR]
    ending = _ending(cluster)
    volumes = _volumes(cluster, size, sidecar_image)
    before = [_sidecar(cluster, sidecar_image, transfer, size)]
    if cluster.spec.sidecar.payload != IMAGE_VOLUME:
        before.append(_payload(cluster, sidecar_image))
    spec: Object = {
        "automountServiceAccountToken": False,
        "containers": [_engine(cluster, images[names.ENGINE], ending)],
        # Service variables would look like options: LMCACHE_... is also the sidecar's prefix.
        "enableServiceLinks": False,
        "initContainers": before,
        "securityContext": _POD_SECURITY,
        "serviceAccountName": names.engine_name(cluster.name),
        "terminationGracePeriodSeconds": ending.grace,
        # What the user says of one has the form of a volume, with a name: ours comes first, and last.
        "volumes": [{"name": own.name} | own.source | {"name": own.name} for own in volumes],
        **pod_claims(cluster),
    }
    if (runtime_class := cluster.engine.gpu.runtime_class_name) is not None:
        spec["runtimeClassName"] = runtime_class
    return spec


class _Ending(NamedTuple):
    """Seconds; what the user sets leads."""

    shutdown: int
    """For the requests that an engine has when it has to stop."""
    grace: int
    """For the pod."""


def _ending(cluster: Cluster) -> _Ending:
    others = _NOTICE_SECONDS + _WRITE_OUT_SECONDS
    given = int_option(cluster.engine.args, SHUTDOWN_TIMEOUT)
    grace = at(cluster.engine.pod_template, "spec", "terminationGracePeriodSeconds")
    if isinstance(grace, int):
        return _Ending(max(0, grace - others) if given is None else given, grace)
    shutdown = _SHUTDOWN_SECONDS if given is None else given
    return _Ending(shutdown, shutdown + others)


def _engine(cluster: Cluster, image: str, ending: _Ending) -> Object:
    is_mounted = cluster.spec.sidecar.payload == IMAGE_VOLUME
    env = {
        "HF_HOME": f"{paths.MODELS_DIR}/huggingface",
        "HOME": paths.HOME_DIR,
        "LMCACHE_SOCKET": paths.SOCKET_PATH,
        # Block hashes must be the same in every process, or no pod could use what another stored.
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": paths.PAYLOAD_DIR + (paths.PAYLOAD_SOURCE if is_mounted else ""),
        # torch asks for the user's name, and an image need not know the uid.
        "USER": "lmcache",
    }
    if cluster.model.token_secret_ref is not None:
        env["HF_TOKEN_PATH"] = f"{paths.HUB_TOKEN_DIR}/token"
    engine: Object = {}
    # The kubelet asks as clients do, and does not look at whose certificate it is.
    has_tls = option(cluster.engine.args, SSL_CERTIFICATE) is not None
    health = partial(_probe, "/health", names.ENGINE_PORT, scheme="HTTPS" if has_tls else None)
    own = of_container(cluster.engine.pod_template, names.ENGINE)
    # The API server wants the sleep to end before the grace period does, and no second thing to do beside it.
    if ending.grace > _NOTICE_SECONDS and not at(own, "lifecycle", "preStop"):
        engine["lifecycle"] = {"preStop": {"sleep": {"seconds": _NOTICE_SECONDS}}}
    return (
        _container(cluster, names.ENGINE, image, env)
        | engine
        | {
            "args": engine_args(cluster, ending.shutdown),
            "command": ["vllm", "serve"],
            "livenessProbe": health(period=10, failures=6) | _HUNG,
            "ports": [{"containerPort": names.ENGINE_PORT, "name": "http", "protocol": "TCP"}],
            "readinessProbe": health(period=5, failures=3),
            "resources": _engine_resources(cluster),
            # One hour: large models are downloaded and loaded before the engine answers.
            "startupProbe": health(period=5, failures=720),
        }
    )


def _engine_resources(cluster: Cluster) -> Object:
    """GPUs, and a floor of host memory and CPU for each worker.

    Without it an engine would be the first to go where the node's memory runs out, weigh less than its own
    sidecar where CPUs do, and be refused where a quota counts requests. There is no limit: it depends on the
    model.
    """
    num_workers = cluster.engine.parallelism.num_ranks
    requests = {"cpu": f"{num_workers}", "memory": f"{4 * num_workers}Gi"}
    return engine_resources(cluster) | {"requests": _unlimited(cluster, names.ENGINE, requests)}


def _sidecar(cluster: Cluster, image: str, transfer: Transfer, size: MemorySize) -> Object:
    env = {"HOME": paths.SOCKET_DIR} | sidecar_env(transfer)
    if size.max_bytes is not None:
        env |= {MAX_SIZE: f"{size.max_bytes}", SIZE_FILE: f"{paths.MEMORY_DIR}/{paths.SIZE_FILE}"}
    if disk := cluster.spec.tiers.disk:
        # Variables, not keys of the shared file: they are of this pod's volume, as the size of its memory is.
        env |= {"LMCACHE_DISK_PATH": paths.DISK_DIR, DISK_SIZE: f"{disk.num_bytes}"}
    has_gpus = transfer.mode == CUDA_IPC
    num_gpus = cluster.engine.gpu.count if has_gpus else 0
    memory = format_mebibytes(sidecar_memory(size.num_bytes, num_gpus))
    claims = {"claims": [{"name": CLAIM}]} if has_gpus and has_claim(cluster) else {}
    return _container(cluster, names.SIDECAR, image, env, size) | {
        # The size is an argument, not a key of the shared file: each pod has its own.
        "args": ["serve", f"--config={paths.CONFIG_DIR}/sidecar.yaml", f"{SIZE_ARGUMENT}{size.num_bytes}"],
        "livenessProbe": _probe("/healthz", names.SIDECAR_PORT, period=10, failures=6) | _HUNG,
        "ports": [{"containerPort": names.SIDECAR_PORT, "name": "metrics", "protocol": "TCP"}],
        "resources": {
            "limits": {"memory": memory},
            # A tenth of an engine's: where CPUs are short, copies for later wait for requests.
            "requests": _unlimited(cluster, names.SIDECAR, {"cpu": "100m"}) | {"memory": memory},
            **claims,
        },
        "restartPolicy": "Always",
        "securityContext": {**_CONTAINER_SECURITY, "readOnlyRootFilesystem": True},
    }


def _payload(cluster: Cluster, image: str) -> Object:
    return _container(cluster, names.PAYLOAD, image, {}) | {
        "command": ["cp", "-r", f"{paths.PAYLOAD_SOURCE}/.", paths.PAYLOAD_DIR],
        "resources": {
            "limits": {"memory": "256Mi"},
            "requests": _unlimited(cluster, names.PAYLOAD, {"cpu": "100m", "memory": "64Mi"}),
        },
    }


def _unlimited(cluster: Cluster, container: str, requests: dict[str, str]) -> dict[str, str]:
    """Those of our requests that no limit of the user's can contradict: one alone is also the request."""
    limits = at(of_container(declared_template(cluster), container), "resources", "limits")
    return {name: amount for name, amount in requests.items() if at(limits, name) is None}


def _container(
    cluster: Cluster, name: str, image: str, env: dict[str, str], size: MemorySize | None = None
) -> Object:
    mounts = {volume.path: volume.name for volume in _volumes(cluster, size) if name in volume.users}
    return {
        "env": [{"name": key, "value": env[key]} for key in sorted(env)],
        "image": image,
        "name": name,
        "securityContext": _CONTAINER_SECURITY,
        # The last lines of one that failed are in the pod's status, and from there in the cluster's.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"mountPath": path, "name": mounts[path]} for path in sorted(mounts)],
    }


class _Volume(NamedTuple):
    name: str
    path: str
    """Where it is in every container that has it."""
    users: tuple[str, ...]
    """Containers that have it."""
    source: Object


def _volumes(cluster: Cluster, size: MemorySize | None, sidecar_image: str = "") -> list[_Volume]:
    payload: Object = {"emptyDir": {}}
    if cluster.spec.sidecar.payload == IMAGE_VOLUME:
        payload = {"image": {"reference": sidecar_image}}
    spec, engine, sidecar = cluster.spec, (names.ENGINE,), (names.SIDECAR,)
    # The arena's file is exactly as large as the tier can get: its head, slot table and index are taken out
    # of that. It has no more pages than the tier's present size.
    most = (size.max_bytes or size.num_bytes) if size else 0
    arena = _in_memory(format_mebibytes(most))
    config = {"configMap": {"name": names.config_name(cluster.name)}}
    found = [
        _Volume("arena", paths.ARENA_DIR, engine + sidecar, arena),
        _Volume("config", paths.CONFIG_DIR, sidecar, config),
        _Volume("home", paths.HOME_DIR, engine, {"emptyDir": {}}),
        _Volume("models", paths.MODELS_DIR, engine, cluster.model.volume or {"emptyDir": {}}),
        _Volume("payload", paths.PAYLOAD_DIR, (*engine, names.PAYLOAD), payload),
        # Workers exchange tensors there; a container's own has 64 MiB.
        _Volume(SHM, "/dev/shm", engine, _in_memory("8Gi")),
        _Volume("socket", paths.SOCKET_DIR, engine + sidecar, _in_memory("16Mi")),
    ]
    if size and size.max_bytes is not None:
        annotation = {"fieldPath": f"metadata.annotations['{names.MEMORY_SIZE}']"}
        told = {"downwardAPI": {"items": [{"fieldRef": annotation, "path": paths.SIZE_FILE}]}}
        found.append(_Volume("memory-size", paths.MEMORY_DIR, sidecar, told))
    if disk := spec.tiers.disk:
        found.append(_Volume("disk", paths.DISK_DIR, sidecar, _own_volume(disk)))
    if token := cluster.model.token_secret_ref:
        found.append(_Volume("hub-token", paths.HUB_TOKEN_DIR, engine, _secret(token.name, token=token.key)))
    if owner := names.remote_owner(cluster):
        # Without them the sidecar has no remote tier, and the engine runs.
        listed = {"configMap": {"name": names.remote_name(owner), "optional": True}}
        secrets = {
            "password": names.remote_name(owner),
            paths.AUTHORITY_FILE: names.remote_certificate(cluster),
        }
        sources = [
            {"secret": {"items": [{"key": key, "path": key}], "name": name, "optional": True}}
            for key, name in secrets.items()
        ]
        found.append(_Volume("remote", paths.REMOTE_DIR, sidecar, listed))
        found.append(
            _Volume("remote-auth", paths.REMOTE_AUTH_DIR, sidecar, {"projected": {"sources": sources}})
        )
    if auth := spec.tiers.remote_auth:
        source = _secret(auth.name, password=auth.password_key, username=auth.username_key)
        found.append(_Volume("remote-auth", paths.REMOTE_AUTH_DIR, sidecar, source))
    return sorted(found)


def _in_memory(size: str) -> Object:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _own_volume(disk: DiskTier) -> Object:
    """A generic ephemeral volume: made for the pod, and deleted with it."""
    claim: Object = {"accessModes": ["ReadWriteOnce"]}
    claim["resources"] = {"requests": {"storage": format_mebibytes(disk.volume_bytes)}}
    if disk.storage_class_name is not None:
        claim["storageClassName"] = disk.storage_class_name
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _secret(name: str, **keys: str | None) -> Object:
    """Files named as we read them, whatever the user's keys are called."""
    items = [{"key": key, "path": path} for path, key in keys.items() if key is not None]
    return {"secret": {"items": items, "secretName": name}}


def _probe(path: str, port: int, *, period: int, failures: int, scheme: str | None = None) -> Object:
    request: Object = {"path": path, "port": port} | ({"scheme": scheme} if scheme else {})
    return {"failureThreshold": failures, "httpGet": request, "periodSeconds": period, "timeoutSeconds": 5}
