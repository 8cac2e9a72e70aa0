"""The pod of one shard: a Redis or Valkey server without persistence, with LRU eviction.

All sidecars log in as one Redis user. The default user is disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import ManagedRemote
from lmcache_operator.specs import Object, names, paths, stateful
from lmcache_operator.specs.merge import merge
from lmcache_operator.specs.objects import Mount, PodContainer, PodTemplate, Probe, Resources
from lmcache_store.common.units import format_mebibytes

_UID = 999
"""The uid of the stock Redis and Valkey images."""
_RUN_DIR = "/run/lmcache"
_RIGHTS = (
    "~lmc1:* resetchannels -@all +hset +hget +hmget +hexists +unlink +ping +info "
    "+zadd +zremrangebyrank +expire +zrevrangebyscore "
    "+get +set +exists +touch"  # for sidecars of earlier releases, until their pods are replaced
)
"""ACL rules for sidecars: the commands that they use, on keys with their prefix
(sidecar/lmcache_store/tiers/remote/address.py)."""
_KEEPER_RIGHTS = "resetkeys resetchannels -@all +config|set +acl|setuser"
_SOCKET = f"{_RUN_DIR}/socket"
_KEEPER = "keeper"
"""Redis user that updates passwords and the certificate inside the pod. The start script makes its
password."""
_CLI = f'"$(command -v valkey-cli || command -v redis-cli)" -s {_SOCKET}'
_FOLLOW_SECONDS = 10
_START = f"""\
umask 077
cd {paths.REMOTE_AUTH_DIR}
test -s password || {{ echo 'the Secret has no key "password"'; exit 1; }}
hash() {{ sha256sum | head -c 64; }}
passwords() {{
  for file in password other; do
    ! test -s $file || echo "#$(printf %s "$(cat $file)" | hash)"
  done
}}
files() {{ cat password other {paths.REMOTE_TLS_DIR}/tls.* 2>&1 | hash; }}
renewal() {{
  echo "AUTH {_KEEPER} $key"
  echo "ACL SETUSER {names.REMOTE_USER} resetpass" $(passwords)
  ! test -e {paths.REMOTE_TLS_DIR} || echo "CONFIG SET tls-cert-file {paths.REMOTE_TLS_DIR}/tls.crt"
}}
key=$(head -c 32 /dev/urandom | hash)
seen=$(files)
read -r me rest < /proc/self/stat
{{
  echo "$1"
  echo 'user default off'
  echo "user {names.REMOTE_USER} on" $(passwords) '{_RIGHTS}'
  echo "user {_KEEPER} on #$(printf %s $key | hash) {_KEEPER_RIGHTS}"
}} > {_RUN_DIR}/conf
while sleep {_FOLLOW_SECONDS} && kill -0 $me; do
  now=$(files)
  test "$now" != "$seen" && test -s password || continue
  answer=$(renewal | {_CLI} 2>&1 | grep . | sort -u)
  if test "$answer" = OK; then seen=$now; answer=done; fi
  echo "Changed passwords or certificate: $answer"
done &
exec "$(command -v valkey-server || command -v redis-server)" {_RUN_DIR}/conf
"""
"""Start script of the container.

The Secret has the sidecars' password in ``password``. During a rotation, ``other`` has a second valid
password.

The configuration is in memory and holds hashes of the passwords, not the passwords. When the kubelet updates
the Secrets' files, a loop updates the server. The script avoids two dollar signs in a row, because Kubernetes
would replace them by one. So it reads its process id (``me``) from /proc/self/stat.
"""
_PING = f"exec {_CLI} ping"
"""Probe command. An authentication error is an answer, too.

``exec`` replaces the shell: otherwise a timeout would kill only the shell, and the kubelet would wait two
minutes for the output of its child.
"""
_TLS = {
    "port": "0",
    "tls-port": f"{names.REMOTE_PORT}",
    "tls-cert-file": f"{paths.REMOTE_TLS_DIR}/tls.crt",
    "tls-key-file": f"{paths.REMOTE_TLS_DIR}/tls.key",
    # Clients authenticate by password.
    "tls-auth-clients": "no",
}
_TLS_VOLUME = "tls"
_LEAST_SPARE_BYTES = 256 * 2**20


def store_bytes(limit_bytes: int) -> int:
    """Bytes that a server may store under a memory limit. The rest is for connection buffers, tables and
    fragmentation. Nothing is reserved for forks: there is no persistence and no replication."""
    return limit_bytes - max(_LEAST_SPARE_BYTES, limit_bytes // 5)


def settings(managed: ManagedRemote) -> str:
    """The server's configuration file, valid for both Redis and Valkey."""
    lines = {
        **(_TLS if managed.tls else {"port": f"{names.REMOTE_PORT}"}),
        "unixsocket": _SOCKET,
        "protected-mode": "no",
        "dir": _RUN_DIR,
        "save": '""',
        "appendonly": "no",
        "maxmemory": f"{store_bytes(managed.shard_bytes)}",
        "maxmemory-policy": "allkeys-lru",
        # With "yes", a background thread frees hashes of more than 64 fields. Redis would not wait for that
        # memory and evict more rows, possibly all.
        "lazyfree-lazy-eviction": "no",
        "lazyfree-lazy-server-del": "yes",
    }
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def pod_template(cluster: Cluster, managed: ManagedRemote, image: str, spec_hash: str) -> PodTemplate:
    """The pod template of the StatefulSet."""
    volumes: list[Object] = [
        {"name": "auth", "projected": {"sources": _passwords(cluster)}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts: list[Mount] = [
        {"mountPath": paths.REMOTE_AUTH_DIR, "name": "auth", "readOnly": True},
        {"mountPath": _RUN_DIR, "name": "run"},
    ]
    if managed.tls:
        certificate = names.remote_certificate(cluster)
        files = stateful.items("tls.crt", "tls.key", "ca.crt")
        volumes.append({"name": _TLS_VOLUME, "secret": {"items": files, "secretName": certificate}})
        mounts.append({"mountPath": paths.REMOTE_TLS_DIR, "name": _TLS_VOLUME, "readOnly": True})
    spec = stateful.pod_spec(
        cluster,
        names.REMOTE,
        affinity=stateful.spread_over_nodes(names.selector(cluster.name, names.REMOTE)),
        automountServiceAccountToken=False,
        containers=[_server(managed, image, mounts)],
        securityContext=stateful.pod_security(cluster, _UID, fsGroup=_UID),
        terminationGracePeriodSeconds=10,
        volumes=volumes,
    )
    if managed.node_selector:
        spec["nodeSelector"] = managed.node_selector
    if managed.priority_class_name:
        spec["priorityClassName"] = managed.priority_class_name
    if managed.tolerations:
        spec["tolerations"] = managed.tolerations
    labels = names.labels(cluster, names.REMOTE)
    return {"metadata": {"annotations": {names.SPEC_HASH: spec_hash}, "labels": labels}, "spec": spec}


def _passwords(cluster: Cluster) -> list[Object]:
    """The sources of the files with passwords. Only a rotation needs the second one."""
    secret = names.created_secret(cluster, names.REMOTE)
    return [
        {"secret": {"items": stateful.items("password"), "name": secret}},
        {"secret": {"items": stateful.items("other"), "name": secret, "optional": True}},
    ]


def speaks_tls(pod_or_template: Mapping[str, Any]) -> bool:
    """Whether the server of a pod, or of a pod template, uses TLS."""
    return any(volume["name"] == _TLS_VOLUME for volume in pod_or_template["spec"].get("volumes") or ())


def _server(managed: ManagedRemote, image: str, mounts: list[Mount]) -> PodContainer:
    memory = format_mebibytes(managed.shard_bytes)
    resources: Resources = {"limits": {"memory": memory}, "requests": {"memory": memory}}
    if "cpu" not in (managed.resources.get("limits") or {}):
        resources["requests"]["cpu"] = "500m"
    return {
        "args": [settings(managed)],
        "command": ["sh", "-ec", _START, "sh"],
        "env": [{"name": name, "value": value} for name, value in stateful.NO_GPUS.items()],
        "image": image,
        "livenessProbe": _probe(period=10, failures=6),
        "name": names.REMOTE,
        "ports": [{"containerPort": names.REMOTE_PORT, "name": "redis", "protocol": "TCP"}],
        "readinessProbe": _probe(period=5, failures=3),
        "resources": merge(resources, managed.resources),
        "securityContext": stateful.READ_ONLY_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _probe(*, period: int, failures: int) -> Probe:
    ping = {"command": ["sh", "-c", _PING]}
    return {"exec": ping, "failureThreshold": failures, "periodSeconds": period, "timeoutSeconds": 5}
