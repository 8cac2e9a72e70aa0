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

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import DiskTier, Tiers
from lmcache_operator.api.types import TOKEN
from lmcache_operator.components.engine import authentication, gpus, template
from lmcache_operator.components.engine.encryption import key_options, key_volumes
from lmcache_operator.components.engine.kinds import kind_of
from lmcache_operator.components.engine.tenants import salts_volume
from lmcache_operator.pods.resize import MAX_SIZE, SIZE_ARGUMENT, SIZE_FILE, sidecar_memory
from lmcache_operator.specs import Images, Object, names, paths, stateful
from lmcache_operator.specs.merge import dig
from lmcache_store.common.units import format_mebibytes

# The uid of the stock engine image. Engine and sidecar share it, so one user owns socket, locks and arena.
_UID = 2000
DISK_SIZE = "LMCACHE_DISK_SIZE"
_POD_NAME = "KUBERNETES_POD_NAME"
"""Variable with the pod's name, from which the kubelet makes other variables."""
_NOTICE_SECONDS = 5
_SHUTDOWN_SECONDS = 60
_WRITE_OUT_SECONDS = 55
"""Time for the engine's processes to exit, and then for the sidecar to write out its queue (20 s)."""
# A hung container can't shut down cleanly. Without this, the kubelet would grant it the pod's grace period.
_HUNG = {"terminationGracePeriodSeconds": 10}


class MemorySize(NamedTuple):
    """Bytes of a pod's memory tier."""

    num_bytes: int
    """Size at creation of the pod."""
    max_bytes: int | None = None
    """Largest size while the pod runs; None: the size is fixed."""


def pod_template(
    cluster: Cluster, images: Images, spec_hash: str, transfer: gpus.Transfer, size: MemorySize
) -> Object:
    """The pod template of the StatefulSet, with the user's pod settings merged in.

    Raises:
        InvalidSpecError: a setting of the user breaks what the cache needs.
    """
    annotations = {names.SPEC_HASH: spec_hash, "kubectl.kubernetes.io/default-container": names.ENGINE}
    if size.max_bytes is not None:
        annotations[names.MEMORY_SIZE] = f"{size.num_bytes}"
    metadata = {"annotations": annotations, "labels": _labels(cluster)}
    base = {"metadata": metadata, "spec": _pod_spec(cluster, images, transfer, size)}
    return template.with_template(base, cluster)


def _labels(cluster: Cluster) -> dict[str, str]:
    labels = names.labels(cluster, names.ENGINE)
    if cluster.spec.tiers.peers:
        labels[names.PEERS_LABEL] = names.peers_owner(cluster)
    if cluster.spec.sidecar.http_authentication == TOKEN:
        labels[names.PAGES_LABEL] = TOKEN
    return labels


def _pod_spec(cluster: Cluster, images: Images, transfer: gpus.Transfer, size: MemorySize) -> Object:
    sidecar_image = images[names.SIDECAR]
    ending = _ending(cluster)
    volumes = _volumes(cluster, size)
    spec: Object = {
        "automountServiceAccountToken": False,
        "containers": [_engine(cluster, images[names.ENGINE], ending, transfer)],
        # The variables of a Service named lmcache... would look like the sidecar's options, LMCACHE_*.
        "enableServiceLinks": False,
        "initContainers": [
            _sidecar(cluster, sidecar_image, transfer, size),
            _payload(cluster, sidecar_image),
        ],
        "securityContext": stateful.pod_security(_UID, fsGroup=_UID, fsGroupChangePolicy="OnRootMismatch"),
        "serviceAccountName": names.engine_name(cluster.name),
        "terminationGracePeriodSeconds": ending.grace,
        # A source that the user gives may have a name, too. The operator's name replaces it and stays first.
        "volumes": [{"name": vol.name} | vol.source | {"name": vol.name} for vol in volumes],
        **gpus.pod_claims(cluster),
        **cluster.spec.images.of_pod,
    }
    if (runtime_class := cluster.engine.gpu.runtime_class_name) is not None:
        spec["runtimeClassName"] = runtime_class
    return spec


class _Ending(NamedTuple):
    """Seconds that a terminating pod may take. The user's settings take precedence."""

    shutdown: int
    """Time for the engine to finish its requests. SGLang has no such limit, and may use the grace period."""
    grace: int
    """Grace period of the pod."""


def _ending(cluster: Cluster) -> _Ending:
    overhead = _NOTICE_SECONDS + _WRITE_OUT_SECONDS
    given = kind_of(cluster).shutdown_seconds(cluster.engine.args)
    grace = dig(cluster.engine.pod_template, "spec", "terminationGracePeriodSeconds")
    if isinstance(grace, int):
        return _Ending(max(0, grace - overhead) if given is None else given, grace)
    shutdown = _SHUTDOWN_SECONDS if given is None else given
    return _Ending(shutdown, shutdown + overhead)


def _engine(cluster: Cluster, image: str, ending: _Ending, transfer: gpus.Transfer) -> Object:
    kind = kind_of(cluster)
    env = {
        **kind.variables_of(cluster),
        "HF_HOME": f"{paths.MODELS_DIR}/huggingface",
        "HOME": paths.HOME_DIR,
        "LMCACHE_SOCKET": paths.SOCKET_PATH,
        "PYTHONPATH": paths.PAYLOAD_DIR,
        # torch looks up the user's name, and the image may not know the uid.
        "USER": "lmcache",
    }
    if cluster.model.token_secret_ref is not None:
        env["HF_TOKEN_PATH"] = f"{paths.HUB_TOKEN_DIR}/token"
    engine: Object = {}
    # With TLS the kubelet must probe over HTTPS. It does not verify the certificate.
    has_tls = kind.option(cluster.engine.args, kind.certificate) is not None
    health = partial(_probe, "/health", names.ENGINE_PORT, scheme="HTTPS" if has_tls else None)
    container = template.find_container(cluster.engine.pod_template, names.ENGINE)
    # The API server requires that the sleep is shorter than the grace period, and allows one preStop action.
    if ending.grace > _NOTICE_SECONDS and not dig(container, "lifecycle", "preStop"):
        engine["lifecycle"] = {"preStop": {"sleep": {"seconds": _NOTICE_SECONDS}}}
    return (
        _container(cluster, names.ENGINE, image, env)
        | engine
        | {
            "args": kind.args(cluster, ending.shutdown, has_reader=transfer.mode == gpus.CUDA_IPC),
            "command": [*kind.command],
            "livenessProbe": health(period=10, failures=6) | _HUNG | {"timeoutSeconds": kind.health_seconds},
            "ports": [{"containerPort": names.ENGINE_PORT, "name": "http", "protocol": "TCP"}],
            "readinessProbe": health(period=5, failures=3),
            "resources": _engine_resources(cluster),
            # One hour, because the engine downloads and loads large models before it answers.
            "startupProbe": health(period=5, failures=720),
        }
    )


def _engine_resources(cluster: Cluster) -> Object:
    """GPUs, and requests of host memory and CPU for each worker.

    Without requests the kubelet would evict the engine first, the sidecar would get more CPU than the engine,
    and a ResourceQuota would reject the pod. There is no limit, because the right limit depends on the model.
    """
    num_workers = cluster.engine.parallelism.num_ranks
    requests = {"cpu": f"{num_workers}", "memory": f"{4 * num_workers}Gi"}
    return gpus.engine_resources(cluster) | {"requests": _unlimited(cluster, names.ENGINE, requests)}


def _sidecar(cluster: Cluster, image: str, transfer: gpus.Transfer, size: MemorySize) -> Object:
    env = {"HOME": paths.SOCKET_DIR} | gpus.sidecar_env(transfer)
    if size.max_bytes is not None:
        env |= {MAX_SIZE: f"{size.max_bytes}", SIZE_FILE: f"{paths.MEMORY_DIR}/{paths.SIZE_FILE}"}
    if disk := cluster.spec.tiers.disk:
        # These are variables and not keys of the shared file, because they describe this pod's own volume.
        env |= {"LMCACHE_DISK_PATH": paths.DISK_DIR, DISK_SIZE: f"{disk.num_bytes}"}
    env |= _peers_env(cluster) | key_options(cluster.spec.tiers)
    env |= authentication.options(cluster.spec.sidecar.http_authentication)
    ports = [{"containerPort": names.SIDECAR_PORT, "name": "metrics", "protocol": "TCP"}]
    if cluster.spec.tiers.peers:
        ports.append({"containerPort": names.PEERS_PORT, "name": "peers", "protocol": "TCP"})
    has_gpus = transfer.mode == gpus.CUDA_IPC
    num_gpus = cluster.engine.gpu.count if has_gpus else 0
    memory = format_mebibytes(sidecar_memory(size.num_bytes, num_gpus))
    claims = {"claims": [{"name": gpus.CLAIM}]} if has_gpus and gpus.has_claim(cluster) else {}
    return _container(cluster, names.SIDECAR, image, env, size) | {
        # The size is an argument and not a key of the shared file, because each pod has its own size.
        "args": ["serve", f"--config={paths.CONFIG_DIR}/sidecar.yaml", f"{SIZE_ARGUMENT}{size.num_bytes}"],
        "livenessProbe": _probe("/healthz", names.SIDECAR_PORT, period=10, failures=6) | _HUNG,
        "ports": ports,
        "resources": {
            "limits": {"memory": memory},
            # A tenth of an engine's CPU: when CPUs are scarce, requests come before write-through copies.
            "requests": _unlimited(cluster, names.SIDECAR, {"cpu": "100m"}) | {"memory": memory},
            **claims,
        },
        "restartPolicy": "Always",
        "securityContext": stateful.READ_ONLY_SECURITY,
    }


def _peers_env(cluster: Cluster) -> dict[str, str]:
    """Options of the peers tier; none without it.

    These are variables and not keys of the shared file, because injected sidecars read that file, too. Their
    pods have no stable names, so they cannot be peers.
    """
    if (peers := cluster.spec.tiers.peers) is None:
        return {}
    host = names.engine_host(cluster.name, cluster.namespace)
    env = {
        "LMCACHE_PEERS_FILE": f"{paths.PEERS_DIR}/{paths.PEERS_FILE}",
        "LMCACHE_PEER_NAME": f"$({_POD_NAME}).{host}:{names.PEERS_PORT}",
        "LMCACHE_PEER_PASSWORD_FILE": f"{paths.PEERS_AUTH_DIR}/password",
        "LMCACHE_PEER_PORT": f"{names.PEERS_PORT}",
    }
    if peers.tls:
        env["LMCACHE_PEER_TLS_DIR"] = paths.PEERS_TLS_DIR
    return env | ({"LMCACHE_PEER_BANDWIDTH": f"{peers.rate_bytes}"} if peers.rate_bytes else {})


def _payload(cluster: Cluster, image: str) -> Object:
    return _container(cluster, names.PAYLOAD, image, {}) | {
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


def _container(
    cluster: Cluster, name: str, image: str, env: dict[str, str], size: MemorySize | None = None
) -> Object:
    mounts = {volume.path: volume.name for volume in _volumes(cluster, size) if name in volume.users}
    variables: list[Object] = [{"name": key, "value": env[key]} for key in sorted(env)]
    if any(_POD_NAME in value for value in env.values()):
        # The kubelet only expands variables that precede the value in the list.
        pod_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        variables.insert(0, {"name": _POD_NAME, "valueFrom": pod_name})
    return {
        "env": variables,
        "image": image,
        "name": name,
        "securityContext": stateful.CONTAINER_SECURITY,
        # The kubelet puts a failed container's last lines into the pod's status. Conditions quote them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"mountPath": path, "name": mounts[path]} for path in sorted(mounts)],
    }


class _Volume(NamedTuple):
    name: str
    path: str
    """Mount path, the same in every container."""
    users: tuple[str, ...]
    """Containers that mount it."""
    source: Object


def _volumes(cluster: Cluster, size: MemorySize | None) -> list[_Volume]:
    spec, engine, sidecar = cluster.spec, (names.ENGINE,), (names.SIDECAR,)
    # The arena's file is as long as the largest size of the tier, head, slot table and index included. Only
    # pages of the tier's present size are allocated.
    max_bytes = (size.max_bytes or size.num_bytes) if size else 0
    arena = _in_memory(format_mebibytes(max_bytes))
    config = {"configMap": {"name": names.config_name(cluster.name)}}
    volumes = [
        _Volume("arena", paths.ARENA_DIR, engine + sidecar, arena),
        _Volume("config", paths.CONFIG_DIR, sidecar, config),
        _Volume("home", paths.HOME_DIR, engine, {"emptyDir": {}}),
        _Volume("models", paths.MODELS_DIR, engine, cluster.model.volume or {"emptyDir": {}}),
        _Volume("payload", paths.PAYLOAD_DIR, (*engine, names.PAYLOAD), {"emptyDir": {}}),
        # Workers exchange tensors in /dev/shm; a container's default of 64 MiB is too small.
        _Volume(template.SHM, "/dev/shm", engine, _in_memory("8Gi")),
        _Volume("socket", paths.SOCKET_DIR, engine + sidecar, _in_memory("16Mi")),
    ]
    if size and size.max_bytes is not None:
        annotation = {"fieldPath": f"metadata.annotations['{names.MEMORY_SIZE}']"}
        size_file = {"downwardAPI": {"items": [{"fieldRef": annotation, "path": paths.SIZE_FILE}]}}
        volumes.append(_Volume("memory-size", paths.MEMORY_DIR, sidecar, size_file))
    if disk := spec.tiers.disk:
        volumes.append(_Volume("disk", paths.DISK_DIR, sidecar, _ephemeral_volume(disk)))
    if spec.tenants and (salts := salts_volume(spec.tenants)):
        volumes.append(_Volume("tenant-salts", paths.SALTS_DIR, sidecar, salts))
    if ref := cluster.model.token_secret_ref:
        volumes.append(_Volume("hub-token", paths.HUB_TOKEN_DIR, engine, _secret(ref.name, token=ref.key)))
    if owner := names.remote_owner(cluster):
        # All sources are optional: if one is missing, the engine runs, and the sidecar has no remote tier.
        listed = {"configMap": {"name": names.remote_name(owner), "optional": True}}
        secrets = {"password": names.remote_name(owner)}
        secrets[paths.AUTHORITY_FILE] = names.remote_certificate(cluster)
        sources = [
            {"secret": {"items": [{"key": key, "path": key}], "name": name, "optional": True}}
            for key, name in secrets.items()
        ]
        volumes.append(_Volume("remote", paths.REMOTE_DIR, sidecar, listed))
        volumes.append(
            _Volume("remote-auth", paths.REMOTE_AUTH_DIR, sidecar, {"projected": {"sources": sources}})
        )
    if spec.tiers.peers:
        name = names.peers_name(names.peers_owner(cluster))
        # Both sources are optional: if one is missing, the engine runs, and the sidecar has no peers.
        password = _secret(name, password="password")["secret"] | {"optional": True}
        volumes += [
            _Volume("peers", paths.PEERS_DIR, sidecar, {"configMap": {"name": name, "optional": True}}),
            _Volume("peers-auth", paths.PEERS_AUTH_DIR, sidecar, {"secret": password}),
        ]
        if spec.tiers.peers.tls:
            # Without the certificate, the sidecar refuses its peers.
            files = {"secret": {"secretName": names.peers_certificate(cluster), "optional": True}}
            volumes.append(_Volume("peers-tls", paths.PEERS_TLS_DIR, sidecar, files))
    if auth := spec.tiers.remote_auth:
        source = _secret(auth.name, password=auth.password_key, username=auth.username_key)
        volumes.append(_Volume("remote-auth", paths.REMOTE_AUTH_DIR, sidecar, source))
    return sorted([*volumes, *_keys(spec.tiers), *_tokens(cluster)])


def _tokens(cluster: Cluster) -> Iterator[_Volume]:
    """The tokens for the sidecar's pages, if the pages need any."""
    if cluster.spec.sidecar.http_authentication == TOKEN:
        source = authentication.token_volume(cluster)
        yield _Volume(authentication.VOLUME, paths.PAGES_DIR, (names.SIDECAR,), source)


def _keys(tiers: Tiers) -> Iterator[_Volume]:
    """Keys of encrypted rows. The mounts have no subPath, because such mounts get no changes."""
    for volume in key_volumes(tiers):
        source = {"secret": {"optional": True, "secretName": volume.secret}}
        yield _Volume(volume.name, volume.path, (names.SIDECAR,), source)


def _in_memory(size: str) -> Object:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _ephemeral_volume(disk: DiskTier) -> Object:
    """A generic ephemeral volume: created for the pod, and deleted with it."""
    claim: Object = {"accessModes": ["ReadWriteOnce"]}
    claim["resources"] = {"requests": {"storage": format_mebibytes(disk.volume_bytes)}}
    if disk.storage_class_name is not None:
        claim["storageClassName"] = disk.storage_class_name
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _secret(name: str, **keys: str | None) -> Object:
    """A Secret volume whose files have the operator's names, whatever names the user's keys have."""
    items = [{"key": key, "path": path} for path, key in keys.items() if key is not None]
    return {"secret": {"items": items, "secretName": name}}


def _probe(path: str, port: int, *, period: int, failures: int, scheme: str | None = None) -> Object:
    request: Object = {"path": path, "port": port} | ({"scheme": scheme} if scheme else {})
    return {"failureThreshold": failures, "httpGet": request, "periodSeconds": period, "timeoutSeconds": 5}
