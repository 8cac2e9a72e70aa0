"""The engine pod: the sidecar, the payload container that copies the client into the engine, and the engine.

The sidecar starts first, but has no startup gate and no readiness probe: neither a slow nor a broken cache
keeps an engine from starting. It listens at once and fills its memory in the background. A pod whose sidecar
does not run is still not Ready for the kubelet. Therefore a sidecar with an invalid configuration stays up,
and the operator rejects every setting that could stop it.

A terminating pod takes three steps:
1. It serves for a few more seconds, until Services and proxies have removed it.
2. The engine finishes its requests and exits.
3. The sidecar writes out its queue to the lower tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine import gpus, groups, template
from lmcache_operator.components.engine.features import FEATURES, merged
from lmcache_operator.components.engine.features.base import POD_NAME, Volume, secret_source
from lmcache_operator.components.engine.kinds import kind_of
from lmcache_operator.components.engine.kv_fields import kv_fields
from lmcache_operator.pods.resize import MAX_SIZE, SIZE_FILE, sidecar_memory
from lmcache_operator.specs import Images, Object, names, paths, stateful
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.objects import EnvVar, PodContainer, PodSpec, PodTemplate, Probe, Resources
from lmcache_store.common.units import format_mebibytes

# The uid of the stock engine image. Engine and sidecar share it, so one user owns socket, locks and arena.
_UID = 2000
_NOTICE_SECONDS = 5
_GROUP_NOTICE_SECONDS = 10
"""Time to serve in all pods of a group: readiness probes fail in the other pods within 5 s."""
_LAUNCHER_SECONDS = 2
"""Time for a launcher to start. Earlier, Linux discards SIGTERM, because the launcher is process 1."""
_SHUTDOWN_SECONDS = 60
_WRITE_OUT_SECONDS = 55
"""Time for the engine's processes to exit, and then for the sidecar to write out its queue (20 s)."""
# A hung container can't shut down cleanly. Without this, the kubelet would grant it the pod's grace period.
_HUNG: Probe = {"terminationGracePeriodSeconds": 10}


class MemorySize(NamedTuple):
    """Bytes of a pod's memory tier."""

    num_bytes: int
    """Size at creation of the pod."""
    max_bytes: int | None = None
    """Largest size while the pod runs; None: the size is fixed."""


def pod_template(
    cluster: Cluster, images: Images, spec_hash: str, transfer: gpus.Transfer, size: MemorySize
) -> PodTemplate:
    """The pod template of the StatefulSet, with the user's pod settings merged in.

    Raises:
        InvalidSpecError: a setting of the user breaks what the cache needs.
    """
    annotations = {names.SPEC_HASH: spec_hash, "kubectl.kubernetes.io/default-container": names.ENGINE}
    annotations[names.KV_FIELDS] = kv_fields(cluster)
    if size.max_bytes is not None:
        annotations[names.MEMORY_SIZE] = f"{size.num_bytes}"
    labels = names.labels(cluster, names.ENGINE) | merged(lambda each: each.labels(cluster))
    base: PodTemplate = {
        "metadata": {"annotations": annotations, "labels": labels},
        "spec": _pod_spec(cluster, images, transfer, size),
    }
    return template.with_template(base, cluster)


def _pod_spec(cluster: Cluster, images: Images, transfer: gpus.Transfer, size: MemorySize) -> PodSpec:
    sidecar_image = images[names.SIDECAR]
    ending = _ending(cluster)
    volumes = _volumes(cluster, size)
    container = partial(_container, volumes)
    sidecar = container(names.SIDECAR, sidecar_image, _sidecar_env(cluster, transfer, size))
    payload = container(names.PAYLOAD, sidecar_image, {})
    engine = container(names.ENGINE, images[names.ENGINE], _engine_env(cluster))
    engine |= _engine(cluster, ending, transfer)
    if cluster.engine.nodes > 1:
        engine = groups.with_launcher(cluster, engine, ending.notice, ending.shutdown)
    spec = stateful.pod_spec(
        cluster,
        names.ENGINE,
        automountServiceAccountToken=False,
        containers=[engine],
        initContainers=[sidecar | _sidecar(cluster, transfer, size), payload | _payload(cluster)],
        securityContext=stateful.pod_security(
            cluster, _UID, fsGroup=_UID, fsGroupChangePolicy="OnRootMismatch"
        ),
        terminationGracePeriodSeconds=ending.grace,
        # A source that the user gives may have a name, too. The operator's name replaces it and stays first.
        volumes=[{"name": vol.name} | vol.source | {"name": vol.name} for vol in volumes],
    )
    spec |= gpus.pod_claims(cluster)
    if (runtime_class := cluster.engine.gpu.runtime_class_name) is not None:
        spec["runtimeClassName"] = runtime_class
    if (topology_key := cluster.engine.topology_key) is not None:
        spec["affinity"] = groups.near_one_another(cluster, topology_key)
    return spec


class _Ending(NamedTuple):
    """Seconds that a terminating pod may take. The user's settings take precedence."""

    pause: int
    """Time before SIGTERM: in a pod without a launcher, until Services and proxies have removed the pod."""
    notice: int
    """Time for which a launcher lets the engine serve after SIGTERM. Both times are 0 if the grace period is
    too short.
    """
    shutdown: int
    """Time for the engine to finish its requests. SGLang has no such limit, and may use the grace period."""
    grace: int
    """Grace period of the pod."""


def _ending(cluster: Cluster) -> _Ending:
    one_pod = cluster.engine.nodes == 1
    pause, notice = (_NOTICE_SECONDS, 0) if one_pod else (_LAUNCHER_SECONDS, _GROUP_NOTICE_SECONDS)
    overhead = pause + notice + _WRITE_OUT_SECONDS
    given = kind_of(cluster).shutdown_seconds(cluster.engine.args)
    grace = dig(cluster.engine.pod_template, "spec", "terminationGracePeriodSeconds")
    if isinstance(grace, int):
        shutdown = max(0, grace - overhead) if given is None else given
        is_short = grace <= pause + notice
        return _Ending(0, 0, shutdown, grace) if is_short else _Ending(pause, notice, shutdown, grace)
    shutdown = _SHUTDOWN_SECONDS if given is None else given
    return _Ending(pause, notice, shutdown, shutdown + overhead)


def _engine_env(cluster: Cluster) -> dict[str, str]:
    declared = template.find_container(template.declared_template(cluster), names.ENGINE)
    env = {
        **kind_of(cluster).variables_of(cluster),
        **gpus.engine_env(cluster, declared),
        "HF_HOME": f"{paths.MODELS_DIR}/huggingface",
        "HOME": paths.HOME_DIR,
        "LMCACHE_SOCKET": paths.SOCKET_PATH,
        "PYTHONPATH": paths.PAYLOAD_DIR,
        # torch looks up the user's name, and the image may not know the uid.
        "USER": "lmcache",
    }
    if cluster.model.token_secret_ref is not None:
        env["HF_TOKEN_PATH"] = f"{paths.HUB_TOKEN_DIR}/token"
    return env


def _engine(cluster: Cluster, ending: _Ending, transfer: gpus.Transfer) -> PodContainer:
    """Fields of the engine's container, besides those that all containers have."""
    kind, engine = kind_of(cluster), PodContainer()
    # With TLS the kubelet must probe over HTTPS. It does not verify the certificate.
    has_tls = kind.option(cluster.engine.args, kind.certificate) is not None
    health = partial(stateful.http_probe, "/health", names.ENGINE_PORT, scheme="HTTPS" if has_tls else None)
    container = template.find_container(cluster.engine.pod_template, names.ENGINE)
    # The API server requires that the sleep is shorter than the grace period, and allows one preStop action.
    if ending.pause and not dig(container, "lifecycle", "preStop"):
        engine["lifecycle"] = {"preStop": {"sleep": {"seconds": ending.pause}}}
    return engine | {
        "args": kind.args(cluster, ending.shutdown, has_reader=transfer.mode == gpus.CUDA_IPC),
        "command": [*kind.command],
        "livenessProbe": health(period=10, failures=6) | _HUNG | {"timeoutSeconds": kind.health_seconds},
        "ports": [{"containerPort": names.ENGINE_PORT, "name": "http", "protocol": "TCP"}],
        "readinessProbe": health(period=5, failures=3),
        "resources": _engine_resources(cluster),
        # One hour, because the engine downloads and loads large models before it answers.
        "startupProbe": health(period=5, failures=720),
    }


def _engine_resources(cluster: Cluster) -> Resources:
    """GPUs, and requests of host memory and CPU for each worker.

    Without requests the kubelet would evict the engine first, the sidecar would get more CPU than the engine,
    and a ResourceQuota would reject the pod. There is no limit, because the right limit depends on the model.
    """
    num_workers = cluster.engine.parallelism.num_ranks // cluster.engine.nodes
    requests = {"cpu": f"{num_workers}", "memory": f"{4 * num_workers}Gi"}
    return gpus.engine_resources(cluster) | {"requests": _unlimited(cluster, names.ENGINE, requests)}


def _sidecar_env(cluster: Cluster, transfer: gpus.Transfer, size: MemorySize) -> dict[str, str]:
    env = {"HOME": paths.SOCKET_DIR} | gpus.sidecar_env(transfer)
    if size.max_bytes is not None:
        env |= {MAX_SIZE: f"{size.max_bytes}", SIZE_FILE: f"{paths.MEMORY_DIR}/{paths.SIZE_FILE}"}
    return env | merged(lambda each: each.env(cluster))


def _sidecar(cluster: Cluster, transfer: gpus.Transfer, size: MemorySize) -> PodContainer:
    """Fields of the sidecar's container, besides those that all containers have."""
    ports = {"metrics": names.SIDECAR_PORT} | merged(lambda each: each.ports(cluster))
    has_gpus = transfer.mode == gpus.CUDA_IPC
    num_gpus = cluster.engine.gpu.count if has_gpus else 0
    memory = format_mebibytes(sidecar_memory(size.num_bytes, num_gpus))
    resources: Resources = {
        "limits": {"memory": memory},
        # A tenth of an engine's CPU: when CPUs are scarce, requests come before write-through copies.
        "requests": _unlimited(cluster, names.SIDECAR, {"cpu": "100m"}) | {"memory": memory},
    }
    if has_gpus and gpus.has_claim(cluster):
        resources["claims"] = [{"name": gpus.CLAIM}]
    return {
        # The size is an argument and not a key of the shared file, because each pod has its own size.
        "args": [
            "serve",
            f"--config={paths.CONFIG_DIR}/sidecar.yaml",
            f"{names.SIZE_ARGUMENT}{size.num_bytes}",
        ],
        "livenessProbe": stateful.http_probe("/healthz", names.SIDECAR_PORT, period=10, failures=6) | _HUNG,
        "ports": [{"containerPort": port, "name": name, "protocol": "TCP"} for name, port in ports.items()],
        "resources": resources,
        "restartPolicy": "Always",
        "securityContext": stateful.READ_ONLY_SECURITY,
    }


def _payload(cluster: Cluster) -> PodContainer:
    return {
        "command": ["cp", "-r", f"{paths.PAYLOAD_SOURCE}/.", paths.PAYLOAD_DIR],
        "resources": {
            "limits": {"memory": "256Mi"},
            "requests": _unlimited(cluster, names.PAYLOAD, {"cpu": "100m", "memory": "64Mi"}),
        },
    }


def _unlimited(cluster: Cluster, container: str, requests: dict[str, str]) -> dict[str, str]:
    """The operator's requests, without resources that the user limits: a limit alone is also the request."""
    declared = template.find_container(template.declared_template(cluster), container)
    limits = dig(declared, "resources", "limits")
    return {name: amount for name, amount in requests.items() if dig(limits, name) is None}


def _container(volumes: Sequence[Volume], name: str, image: str, env: dict[str, str]) -> PodContainer:
    mounts = {volume.path: volume.name for volume in volumes if name in volume.users}
    variables: list[EnvVar] = [{"name": key, "value": env[key]} for key in sorted(env)]
    if any(POD_NAME in value for value in env.values()):
        # The kubelet only expands variables that precede the value in the list.
        pod_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        variables.insert(0, {"name": POD_NAME, "valueFrom": pod_name})
    return {
        "env": variables,
        "image": image,
        "name": name,
        "securityContext": stateful.CONTAINER_SECURITY,
        # The kubelet puts a failed container's last lines into the pod's status. Conditions quote them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"mountPath": path, "name": mounts[path]} for path in sorted(mounts)],
    }


def _volumes(cluster: Cluster, size: MemorySize) -> list[Volume]:
    engine, both = (names.ENGINE,), (names.ENGINE, names.SIDECAR)
    # The arena's file is as long as the largest size of the tier, head, slot table and index included. Only
    # pages of the tier's present size are allocated.
    arena = _in_memory(format_mebibytes(size.max_bytes or size.num_bytes))
    config = {"configMap": {"name": names.config_name(cluster.name)}}
    volumes = [
        Volume("arena", paths.ARENA_DIR, arena, both),
        Volume("config", paths.CONFIG_DIR, config),
        Volume("home", paths.HOME_DIR, {"emptyDir": {}}, engine),
        Volume("models", paths.MODELS_DIR, cluster.model.volume or {"emptyDir": {}}, engine),
        Volume("payload", paths.PAYLOAD_DIR, {"emptyDir": {}}, (*engine, names.PAYLOAD)),
        # Workers exchange tensors in /dev/shm; a container's default of 64 MiB is too small.
        Volume(template.SHM, "/dev/shm", _in_memory("8Gi"), engine),
        Volume("socket", paths.SOCKET_DIR, _in_memory("16Mi"), both),
    ]
    if size.max_bytes is not None:
        annotation = {"fieldPath": f"metadata.annotations['{names.MEMORY_SIZE}']"}
        size_file = {"downwardAPI": {"items": [{"fieldRef": annotation, "path": paths.SIZE_FILE}]}}
        volumes.append(Volume("memory-size", paths.MEMORY_DIR, size_file))
    if ref := cluster.model.token_secret_ref:
        token = secret_source(ref.name, token=ref.key)
        volumes.append(Volume("hub-token", paths.HUB_TOKEN_DIR, token, engine))
    if cluster.engine.nodes > 1:
        secret = secret_source(names.created_secret(cluster, names.GROUP), password=groups.SECRET_KEY)
        volumes.append(Volume("group", paths.GROUP_DIR, secret, engine))
    return sorted([*volumes, *(volume for feature in FEATURES for volume in feature.volumes(cluster))])


def _in_memory(size: str) -> Object:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
