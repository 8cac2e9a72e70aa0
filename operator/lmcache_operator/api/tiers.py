"""Tiers in the spec of an LMCacheCluster."""

from __future__ import annotations

from typing import Any

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
from lmcache_store.common.units import parse_size

MAX_SHARDS = 64
"""Largest number of shards of a managed remote tier, and in the list of a sidecar."""


class MemoryTierSpec(Part):
    """The memory tier: host memory of one pod."""

    size: str = field(
        "Bytes of each pod's memory tier, such as 64Gi. The operator resizes running pods. They can grow to "
        "autoscaling.memory.maxSize, or else to four times the size that they were created with.",
        **size_between("tiers.memory.size", "64Mi", "16Ti"),
    )
    retain_percent: int = field(
        "Per cent of the memory tier in which hints may retain rows that would be evicted otherwise. It "
        "counts for requests without a cache_salt, and for tenants without a share of their own. 0: hints "
        "retain nothing. A change replaces the pods, one at a time.",
        default=25,
        minimum=0,
        maximum=100,
    )
    max_ttl_seconds: int = field(
        "Longest time in seconds for which a hint retains rows. Hints that ask for more get this time. A "
        "change replaces the pods, one at a time.",
        default=3600,
        minimum=1,
        maximum=604_800,
    )

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return parse_size(self.size)


class KeysSecretRef(Part):
    """A Secret with the keys of encrypted rows."""

    name: str = field(
        "Name of the Secret, in the same namespace. Each entry is one version of the key. Its name is a "
        "number from 1 to 4294967295, and its value 64 hexadecimal digits. Sidecars encrypt with the highest "
        "version, in the remote tier three minutes after they read it, and read rows of all versions. "
        "Changed entries reach running pods. A changed name replaces the pods, one at a time.",
        maxLength=253,
        rules=(
            matches(
                NAME["pattern"],
                "must be the name of a Secret: a-z, 0-9, '-' and '.', with a letter or digit at both ends",
            ),
        ),
    )


class EncryptionSpec(Part):
    """Encryption of the rows of a tier."""

    secret_ref: KeysSecretRef = field("Secret with the keys. The operator never reads it.")


class DiskTierSpec(Part):
    """The disk tier: a volume that is created and deleted with its pod."""

    size: str = field(
        "Bytes of each pod's volume, such as 500Gi. The tier uses 85 % of them, because a nearly full file "
        "system is slow. A change applies to a pod at its next replacement.",
        **size_between("tiers.disk.size", "1Gi", "1024Ti"),
    )
    storage_class_name: str | None = field(
        "StorageClass of the volume, best of local NVMe. Default: that of the Kubernetes cluster.", **NAME
    )
    encryption: EncryptionSpec | None = field(
        "Encryption of the rows on the disk. Without a valid key, the tier is off. A change replaces the "
        "pods, one at a time. Default: no encryption."
    )

    @property
    def volume_bytes(self) -> int:
        """Bytes of the volume."""
        return parse_size(self.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tier: 85 % of the volume.

        The sidecar uses at most nine tenths of the free bytes of an empty volume. With ext4 (mkfs.ext4 -m0),
        95 % of 1 GiB and 98 % of 100 GiB are free.
        """
        return self.volume_bytes * 85 // 100


class IssuerRef(Part):
    """An issuer of cert-manager."""

    name: str = field("Name of the issuer.", **NAME)
    kind: str = field("Issuer: in the same namespace.", default="Issuer", enum=["Issuer", "ClusterIssuer"])
    group: str = field("API group of the issuer.", default="cert-manager.io", **NAME)


_ONE_SOURCE = Rule(
    "has(self.secretRef) != has(self.issuerRef)",
    "exactly one of secretRef and issuerRef must be set",
    lambda tls: (tls.secret_ref is None) != (tls.issuer_ref is None),
)


class PeerTlsSecretRef(Part):
    """A Secret with a certificate that the operator does not renew."""

    name: str = field(
        "Name of the Secret, in the same namespace. It has tls.crt for *.NAME-engine.NAMESPACE.svc, tls.key, "
        "and ca.crt with the signing CA. With engine.prefill, tls.crt must also be valid for "
        "*.NAME-prefill-engine.NAMESPACE.svc.",
        **NAME,
    )


class PeerTls(Part):
    """TLS certificate of the sidecars."""

    RULES = (_ONE_SOURCE,)

    secret_ref: PeerTlsSecretRef | None = field("An existing certificate. The operator never reads it.")
    issuer_ref: IssuerRef | None = field(
        "Issuer of cert-manager for the certificate. The operator creates the Certificate NAME-peers."
    )


class ClusterRef(Part):
    """Another LMCacheCluster of the same namespace."""

    name: str = field("Name of the LMCacheCluster.", maxLength=45, pattern=CLUSTER_NAME_PATTERN)


class PeersTierSpec(Part):
    """The peers tier: rows in the memory tiers of other engine pods."""

    bytes_per_second: str | None = field(
        "Bytes that all other pods together may read from one pod in a second, such as 1Gi. At "
        "least 16Mi. A change replaces the pods, one at a time. Default: no limit.",
        **size_between("tiers.peers.bytesPerSecond", "16Mi", "1Ti"),
    )
    tls: PeerTls | None = field(
        "TLS between the sidecars. Renewed certificates need no restart. A change replaces the pods, one at "
        "a time; until then, pods with TLS and pods without it do not read each other. With clusterRef, "
        "both clusters need certificates of the same authority. Default: no TLS."
    )
    cluster_ref: ClusterRef | None = field(
        "Another LMCacheCluster with tiers.peers, whose list and password this one uses: the pods of both "
        "read each other's memory. They share rows only for the same model, layout and chunk size. A change "
        "replaces the pods, one at a time. Default: only the pods of this LMCacheCluster."
    )

    @property
    def rate_bytes(self) -> int | None:
        """Bytes per second; None: no limit."""
        return None if self.bytes_per_second is None else parse_size(self.bytes_per_second)


class AuthSecretRef(Part):
    """Credentials of the remote tier."""

    name: str = field("Name of the Secret, in the same namespace.", **NAME)
    username_key: str | None = field("Key of the user name. Default: Redis' default user.", **SECRET_KEY)
    password_key: str = field("Key of the password.", default="password", **SECRET_KEY)


class ExternalRemote(Part):
    """Redis or Valkey servers that the user runs."""

    url: str = field(
        "URL of the servers: redis://host:port/db, without credentials. Several hosts, joined by commas, "
        "are shards. Also rediss:// (TLS), redis-sentinel://hosts/service, redis-cluster://hosts. Options: "
        "prefix, verify.",
        maxLength=512,
        rules=(
            Rule("!self.contains('@')", "credentials belong in authSecretRef", lambda url: "@" not in url),
            matches(
                REMOTE_URL,
                "must be redis://host:port/db, redis-sentinel://host:port/service/db or "
                "redis-cluster://host:port, with rediss for TLS. Ports are from 1 to 65535. Options: "
                "prefix, and with TLS verify=full, ca or none",
            ),
            Rule(None, "names a host twice", lambda url: len(set(hosts_of(url))) == url.count(",") + 1),
        ),
    )
    auth_secret_ref: AuthSecretRef | None = field("Credentials. The operator never reads them.")


class TlsSecretRef(Part):
    """A Secret with a certificate that the operator does not renew."""

    name: str = field(
        "Name of the Secret, in the same namespace. It has tls.crt for *.NAME-remote.NAMESPACE.svc, "
        "tls.key, and ca.crt with the signing CA. A changed name replaces the engine pods.",
        **NAME,
    )


class ShardTls(Part):
    """TLS certificate of the servers."""

    RULES = (_ONE_SOURCE,)

    secret_ref: TlsSecretRef | None = field("An existing certificate. The operator never reads it.")
    issuer_ref: IssuerRef | None = field(
        "Issuer of cert-manager for the certificate. The operator creates the Certificate NAME-remote."
    )


class ManagedRemote(Part):
    """Shards that the operator runs. Each stores its part of the rows, independently of the others."""

    shards: int = field(
        "Number of servers. Sidecars use added shards once all of them are ready. They read removed shards "
        "for another 15 minutes, and keep the rows that hit there.",
        default=1,
        minimum=1,
        maximum=MAX_SHARDS,
    )
    memory_per_shard: str = field(
        "Memory request and limit of one server. It stores at most 80 % of this size, and leaves at least "
        "256Mi for connections and fragmentation. A change replaces the servers, one every 15 minutes.",
        **size_between("tiers.remote.managed.memoryPerShard", "512Mi", "16Ti"),
    )
    access: str = field(
        "Pods that may use the servers, if NetworkPolicies are enforced. Namespace: also pods of "
        "LMCacheClusters that set tiers.remote.clusterRef. Cluster: only pods of this one.",
        default="Namespace",
        enum=["Namespace", "Cluster"],
    )
    tls: ShardTls | None = field(
        "TLS between sidecars and servers. Renewed certificates need no restart. It costs most of a "
        "connection's speed. A change replaces the servers, one every 15 minutes. Default: no TLS."
    )
    image: str | None = field(
        "Image with Valkey >= 7.2 or Redis >= 6.2, and a shell. Default: see lmcache-operator --help.",
        **IMAGE_NAME,
    )
    resources: dict[str, Any] = field(
        "CPU of one server. Set its memory in memoryPerShard. Default: a request of 500m.",
        default={},
        shape="Container.resources",
        rules=(
            Rule(
                None,
                "limits and requests are objects without memory: set memoryPerShard instead",
                lambda resources: all(
                    isinstance(part := resources.get(kind) or {}, dict) and "memory" not in part
                    for kind in ("limits", "requests")
                ),
            ),
            Rule(None, "a server uses no devices: leave claims out", lambda given: "claims" not in given),
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


class RemoteTierSpec(Part):
    """The remote tier, which all pods share."""

    RULES = (
        Rule(
            "[has(self.managed), has(self.external), has(self.clusterRef)].filter(x, x).size() == 1",
            "exactly one of managed, external and clusterRef must be set",
            lambda tier: [tier.managed, tier.external, tier.cluster_ref].count(None) == 2,
        ),
    )

    managed: ManagedRemote | None = field("Redis or Valkey servers that the operator runs.")
    external: ExternalRemote | None = field("Redis or Valkey servers that you run.")
    cluster_ref: ClusterRef | None = field(
        "Another LMCacheCluster whose managed tier this one uses, if its access allows that. They share rows "
        "only for the same model, layout and chunk size."
    )
    encryption: EncryptionSpec | None = field(
        "Encryption of the rows in the servers, by the sidecars. The servers never get a key. Clusters share "
        "rows only if they have the same keys. Without a valid key, the tier is off. A change replaces the "
        "engine pods, one at a time. Default: no encryption."
    )


class Tiers(Part):
    """Tiers of the cache, fastest first."""

    memory: MemoryTierSpec | None = field("Memory tier of each pod. Required with an engine.")
    disk: DiskTierSpec | None = field("Disk tier of each pod. Default: none.")
    peers: PeersTierSpec | None = field(
        "Rows that an engine pod reads from the memory tiers of the cluster's other engine pods; {} sets no "
        "limit. It suits up to 32 pods. Pods with an injected sidecar do not take part. Default: off."
    )
    remote: RemoteTierSpec | None = field("Remote tier that all pods share. Default: none.")
    admit: str = field(
        "Chunks that are written to the disk and remote tiers. All: every chunk, at once. OnReuse: chunks "
        "that hit in memory, which saves writes if few prompts repeat.",
        default="All",
        enum=["All", "OnReuse"],
    )

    @property
    def external(self) -> ExternalRemote | None:
        """The external remote tier, or None."""
        return self.remote.external if self.remote else None

    @property
    def managed(self) -> ManagedRemote | None:
        """The managed remote tier, or None."""
        return self.remote.managed if self.remote else None

    @property
    def is_remote_alone(self) -> bool:
        """Is a managed remote tier the only tier, for other clusters?"""
        return self.managed is not None and not (self.memory or self.disk or self.peers)

    @property
    def remote_auth(self) -> AuthSecretRef | None:
        """Credentials of the external remote tier, or None."""
        return self.external.auth_secret_ref if self.external else None

    @property
    def key_secrets(self) -> dict[str, str]:
        """Name of the Secret with the keys of each encrypted tier, by tier."""
        encryptions = {
            "disk": self.disk.encryption if self.disk else None,
            "remote": self.remote.encryption if self.remote else None,
        }
        return {tier: each.secret_ref.name for tier, each in encryptions.items() if each}
