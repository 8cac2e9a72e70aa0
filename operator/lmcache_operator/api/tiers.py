"""The tiers of an LMCacheCluster as a user writes them."""

from __future__ import annotations

from typing import Any

from lmcache.units import parse_size
from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.grammar import REMOTE_URL, hosts_of
from lmcache_operator.api.keywords import (
    CLUSTER_NAME_PATTERN,
    IMAGE_NAME,
    NAME,
    SECRET_KEY,
    matches,
    size_between,
)

MAX_SHARDS = 64
"""Of a managed remote tier; sidecars take no longer list."""


class MemoryTier(Part):
    """Host memory of one pod."""

    size: str = field(
        "Bytes of the arena of each pod, e.g. 64Gi. A change reaches pods while they run, up to "
        "autoscaling.memory.maxSize, or else four times the size that they were made with.",
        **size_between("tiers.memory.size", "64Mi", "16Ti"),
    )
    tenant_quota_percent: int = field(
        "How much of the memory the rows of one tenant, that is of requests with one cache_salt, may take: "
        "a tenant that has as much makes room with its own. Requests without a salt are not limited. 100: no "
        "limit. A change replaces the pods, one at a time.",
        default=100,
        minimum=1,
        maximum=100,
    )

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return parse_size(self.size)


class DiskTier(Part):
    """A volume of each pod's own, made and deleted with the pod."""

    size: str = field(
        "Bytes of the volume, e.g. 500Gi. The tier takes 85 % of them: a file system needs some for itself, "
        "and gets slow when it is nearly full. A change reaches a pod when it is next replaced.",
        **size_between("tiers.disk.size", "1Gi", "1024Ti"),
    )
    storage_class_name: str | None = field(
        "StorageClass of the volume, best one of local NVMe. Default: the Kubernetes cluster's own.", **NAME
    )

    @property
    def volume_bytes(self) -> int:
        """Bytes of the volume."""
        return parse_size(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tier. It takes no more than nine tenths of what is free on an empty volume: 95 % of
        one of 1 GiB with ext4, 98 % of one of 100 GiB (mkfs.ext4 -m0)."""
        return self.volume_bytes * 85 // 100


class AuthSecretRef(Part):
    """Credentials of the remote tier."""

    name: str = field("Name of the Secret, in the same namespace.", **NAME)
    username_key: str | None = field("Key of the user name. Default: Redis' default user.", **SECRET_KEY)
    password_key: str = field("Key of the password.", default="password", **SECRET_KEY)


class ExternalRemote(Part):
    """A Redis or Valkey the user runs."""

    url: str = field(
        "redis://host:port/db, without credentials. Several hosts, joined by commas, are shards. "
        "Also rediss:// (TLS), redis-sentinel://hosts/service, redis-cluster://hosts. "
        "Options: prefix, verify.",
        maxLength=512,
        rules=(
            Rule("!self.contains('@')", "credentials belong into authSecretRef", lambda url: "@" not in url),
            matches(
                REMOTE_URL,
                "must be redis://host:port/db, redis-sentinel://host:port/service/db or "
                "redis-cluster://host:port (with TLS: rediss), ports from 1 to 65535; options: prefix, "
                "and with TLS verify=full, ca or none",
            ),
            Rule(None, "names a host twice", lambda url: len(set(hosts_of(url))) == url.count(",") + 1),
        ),
    )
    auth_secret_ref: AuthSecretRef | None = field("Credentials; mounted, never read.")


class IssuerRef(Part):
    """Who of cert-manager signs."""

    name: str = field("Name of the issuer.", **NAME)
    kind: str = field("Issuer: of the same namespace.", default="Issuer", enum=["Issuer", "ClusterIssuer"])
    group: str = field("API group of the issuer.", default="cert-manager.io", **NAME)


class TlsSecretRef(Part):
    """A certificate that somebody else renews."""

    name: str = field(
        "Name of the Secret, in the same namespace: tls.crt for *.NAME-remote.NAMESPACE.svc, tls.key, and in "
        "ca.crt who signed. Other clusters find it if it is NAME-remote-tls; another name, given to engines "
        "that run, replaces their pods.",
        **NAME,
    )


class ShardTls(Part):
    """By what servers show who they are."""

    RULES = (
        Rule(
            "has(self.secretRef) != has(self.issuerRef)",
            "exactly one of secretRef and issuerRef must be set",
            lambda tls: (tls.secret_ref is None) != (tls.issuer_ref is None),
        ),
    )

    secret_ref: TlsSecretRef | None = field("A certificate that is there; mounted, never read.")
    issuer_ref: IssuerRef | None = field(
        "Have cert-manager make and renew one: the operator makes a Certificate, NAME-remote."
    )


class ManagedRemote(Part):
    """Servers that the operator runs: each holds its share of the rows, none knows of the others."""

    shards: int = field(
        "Servers. Those that are added are used when all of them are ready; those that go are read for "
        "another 15 minutes, and what was hit meanwhile is kept.",
        default=1,
        minimum=1,
        maximum=MAX_SHARDS,
    )
    memory_per_shard: str = field(
        "Memory of one server, its request and its limit. It stores 80 % of it, and 256Mi less at least: the "
        "rest is for connections and fragmentation. A change replaces the servers, one every 15 minutes.",
        **size_between("tiers.remote.managed.memoryPerShard", "512Mi", "16Ti"),
    )
    access: str = field(
        "Whose pods may use it. Namespace: also those of other LMCacheClusters of the namespace, which name "
        "it in tiers.remote.clusterRef. Cluster: those of this one alone. It holds where NetworkPolicies do.",
        default="Namespace",
        enum=["Namespace", "Cluster"],
    )
    tls: ShardTls | None = field(
        "Servers speak TLS alone, and sidecars verify them; renewed certificates need no restart. It costs "
        "most of a connection's speed. A change replaces the servers, one every 15 minutes. Default: no TLS."
    )
    image: str | None = field(
        "Image with Valkey >= 7.2 or Redis >= 6.2, and a shell. Default: the operator's, see its help.",
        **IMAGE_NAME,
    )
    resources: dict[str, Any] = field(
        "CPUs of one server; its memory is memoryPerShard. Default: a request of 500m.",
        default={},
        shape="Container.resources",
        rules=(
            Rule(
                None,
                "limits and requests are objects without memory, which is memoryPerShard",
                lambda own: all(
                    isinstance(part := own.get(kind) or {}, dict) and "memory" not in part
                    for kind in ("limits", "requests")
                ),
            ),
        ),
    )
    node_selector: dict[str, Any] = field(
        "Labels of the nodes that servers may run on.", default={}, shape="PodSpec.nodeSelector"
    )
    tolerations: list[dict[str, Any]] = field(
        "Taints of nodes that servers tolerate.", default=[], maxItems=64, shape="PodSpec.tolerations"
    )
    priority_class_name: str | None = field("PriorityClass of the servers.", **NAME)

    @property
    def shard_bytes(self) -> int:
        """Memory of one server."""
        return parse_size(self.memory_per_shard)


class ClusterRef(Part):
    """Another LMCacheCluster of the same namespace."""

    name: str = field(
        "Name of an LMCacheCluster with tiers.remote.managed.", maxLength=45, pattern=CLUSTER_NAME_PATTERN
    )


class RemoteTier(Part):
    """A cache that all pods share."""

    RULES = (
        Rule(
            "[has(self.managed), has(self.external), has(self.clusterRef)].filter(x, x).size() == 1",
            "exactly one of managed, external and clusterRef must be set",
            lambda tier: [tier.managed, tier.external, tier.cluster_ref].count(None) == 2,
        ),
    )

    managed: ManagedRemote | None = field("Redis or Valkey servers that the operator runs.")
    external: ExternalRemote | None = field("A Redis or Valkey that exists already.")
    cluster_ref: ClusterRef | None = field(
        "The managed tier of another cluster, where that allows it. Rows are found where models, their "
        "layouts and chunks are the same."
    )


class Tiers(Part):
    """Where KV is kept, fastest first."""

    memory: MemoryTier | None = field("Host memory, per pod. Every engine has it.")
    disk: DiskTier | None = field("A volume, per pod. Default: none.")
    remote: RemoteTier | None = field("A remote tier all pods share. Default: none.")
    admit: str = field(
        "Which chunks are written to the disk and remote tiers. All: every chunk, at once. OnReuse: those "
        "that were hit in memory, which spares volumes and networks where few prompts come again.",
        default="All",
        enum=["All", "OnReuse"],
    )

    @property
    def external(self) -> ExternalRemote | None:
        """A remote tier of the user's own, if it is that."""
        return self.remote.external if self.remote else None

    @property
    def managed(self) -> ManagedRemote | None:
        """A remote tier of the cluster's own, if it is that."""
        return self.remote.managed if self.remote else None

    @property
    def remote_auth(self) -> AuthSecretRef | None:
        """The user's credentials for it, if it needs any."""
        return self.external.auth_secret_ref if self.external else None
