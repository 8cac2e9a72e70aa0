"""The pod of one shard: a server that keeps nothing on disk, for one user, and evicts what is used least."""

from __future__ import annotations

from lmcache.units import format_mebibytes
from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import ManagedRemote
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import merge

_UID = 999
"""Of the stock images."""
_RUN_DIR = "/run/lmcache"
_RIGHTS = (
    "~lmc1:* resetchannels -@all +hset +hget +hmget +hexists +unlink +ping +info "
    "+get +set +exists +touch"  # for sidecars of earlier releases, until their pods are replaced
)
"""What sidecars need (lmcache/tiers/remote/address.py), of names with our prefix."""
_KEEPER_RIGHTS = "resetkeys resetchannels -@all +config|set +acl|setuser"
_SOCKET = f"{_RUN_DIR}/socket"
_KEEPER = "keeper"
"""The user that renews passwords and certificate, from within: its password is in the memory of a shell."""
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
"""Hashes of passwords, not themselves, go into the configuration, which is in memory. The Secrets' files are
renewed by the kubelet, and so is what the server took from them. Of two dollars in a row Kubernetes takes one
away."""
_PING = f"exec {_CLI} ping"
"""That we are nobody to it is an answer, too. Where a shell waits for it the shell alone is killed when there
is none in time, and the kubelet waits two minutes for the other's output."""
_TLS = {
    "port": "0",
    "tls-port": f"{names.REMOTE_PORT}",
    "tls-cert-file": f"{paths.REMOTE_TLS_DIR}/tls.crt",
    "tls-key-file": f"{paths.REMOTE_TLS_DIR}/tls.key",
    # A password is asked for.
    "tls-auth-clients": "no",
}
_TLS_VOLUME = "tls"
_LEAST_SPARE_BYTES = 256 * 2**20


def store_bytes(limit_bytes: int) -> int:
    """What a server may store: the rest is for buffers of connections, tables and fragmentation. It has no
    child processes, since it keeps nothing on disk and has no replicas."""
    return limit_bytes - max(_LEAST_SPARE_BYTES, limit_bytes // 5)


def settings(managed: ManagedRemote) -> str:
    """The server's configuration file, for Redis and Valkey alike."""
    lines = {
        **(_TLS if managed.tls else {"port": f"{names.REMOTE_PORT}"}),
        "unixsocket": _SOCKET,
        "protected-mode": "no",
        "dir": _RUN_DIR,
        "save": '""',
        "appendonly": "no",
        "maxmemory": f"{store_bytes(managed.shard_bytes)}",
        "maxmemory-policy": "allkeys-lru",
        # With "yes", another thread frees hashes of more than 64 fields. Redis does not wait for that memory
        # and evicts more rows, up to all of them.
        "lazyfree-lazy-eviction": "no",
        "lazyfree-lazy-server-del": "yes",
    }
    return "\n".join(f"{name} {value}" for name, value in lines.items())


def pod_template(cluster: Cluster, managed: ManagedRemote, image: str, spec_hash: str) -> Object:
    """The template of the StatefulSet."""
    selector = names.selector(cluster.name, names.REMOTE)
    apart = {"labelSelector": {"matchLabels": selector}, "topologyKey": "kubernetes.io/hostname"}
    spec: Object = {
        # A node that is lost takes as few of them along as can be.
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"podAffinityTerm": apart, "weight": 100}]
            }
        },
        "automountServiceAccountToken": False,
        "containers": [_server(managed, image)],
        "enableServiceLinks": False,
        "securityContext": {
            "fsGroup": _UID, "runAsGroup": _UID, "runAsNonRoot": True, "runAsUser": _UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 10,
        "volumes": [
            {"name": "auth", "secret": {"secretName": names.remote_name(cluster.name)}},
            {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }  # fmt: skip
    if managed.tls:
        certificate = names.remote_certificate(cluster)
        spec["volumes"].append({"name": _TLS_VOLUME, "secret": {"secretName": certificate}})
        mount = {"mountPath": paths.REMOTE_TLS_DIR, "name": _TLS_VOLUME, "readOnly": True}
        spec["containers"][0]["volumeMounts"].append(mount)
    placed = {
        "nodeSelector": managed.node_selector,
        "priorityClassName": managed.priority_class_name,
        "tolerations": managed.tolerations,
    }
    metadata = {"annotations": {names.SPEC_HASH: spec_hash}, "labels": names.labels(cluster, names.REMOTE)}
    return {"metadata": metadata, "spec": spec | {key: value for key, value in placed.items() if value}}


def speaks_tls(pod_or_template: Object) -> bool:
    """Whether the server of a pod, or of those to come, does."""
    return any(volume["name"] == _TLS_VOLUME for volume in pod_or_template["spec"].get("volumes") or ())


def _server(managed: ManagedRemote, image: str) -> Object:
    memory = format_mebibytes(managed.shard_bytes)
    ours: Object = {"limits": {"memory": memory}, "requests": {"memory": memory}}
    if "cpu" not in (managed.resources.get("limits") or {}):
        ours["requests"]["cpu"] = "500m"
    return {
        "args": [settings(managed)],
        "command": ["sh", "-ec", _START, "sh"],
        "image": image,
        "livenessProbe": _probe(period=10, failures=6),
        "name": names.REMOTE,
        "ports": [{"containerPort": names.REMOTE_PORT, "name": "redis", "protocol": "TCP"}],
        "readinessProbe": _probe(period=5, failures=3),
        "resources": merge(ours, managed.resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"mountPath": paths.REMOTE_AUTH_DIR, "name": "auth", "readOnly": True},
            {"mountPath": _RUN_DIR, "name": "run"},
        ],
    }


def _probe(*, period: int, failures: int) -> Object:
    ask = {"command": ["sh", "-c", _PING]}
    return {"exec": ask, "failureThreshold": failures, "periodSeconds": period, "timeoutSeconds": 5}
