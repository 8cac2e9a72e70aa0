"""The remote tier: the servers that a sidecar uses, their credentials, and the condition. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.features.base import (
    LowerTierFeature,
    Volume,
    optional_list,
    secret_source,
)
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of
from lmcache_operator.specs import Object, names, paths, stateful
from lmcache_operator.specs.merge import dig

_UNRESOLVED = re.compile("([a-zA-Z0-9.-]+):[0-9]+: cannot resolve the host")


class RemoteFeature(LowerTierFeature):
    """The remote tier of an engine pod."""

    name = "remote"
    condition_type = "RemoteTierReachable"
    reserved = dict.fromkeys(
        ("LMCACHE_REMOTE_URL", "LMCACHE_REMOTE_PASSWORD_FILE", "LMCACHE_REMOTE_USERNAME_FILE"), "tiers.remote"
    )

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """The pod has only the encryption of a managed tier, and mounts Secrets by their names."""
        if (owner := names.remote_owner(cluster)) is None:
            return
        remote = settings["tiers"]["remote"]
        if cluster.spec.tiers.managed is not None:
            encryption = remote.get("encryption")
            remote = {"managed": True} | ({"encryption": encryption} if encryption else {})
        secrets = [names.tier_secret(cluster, owner, names.REMOTE), names.remote_certificate(cluster)]
        settings["tiers"]["remote"] = remote | {"secrets": secrets}

    def config(self, cluster: Cluster) -> Object:
        """URL of the servers, and the files with the list of shards and with credentials."""
        config: Object = {}
        if external := cluster.spec.tiers.external:
            config["remote_url"] = external.url
        if owner := names.remote_owner(cluster):
            # Sidecars use this host only while they have no list of shards; it also helps people who debug.
            host = names.host(owner, names.REMOTE, cluster.namespace)
            config["remote_url"] = f"redis://{names.REMOTE_USER}@{host}:{names.REMOTE_PORT}"
            config["remote_shards_file"] = f"{paths.REMOTE_DIR}/{paths.SHARDS_FILE}"
            config["remote_password_file"] = f"{paths.REMOTE_AUTH_DIR}/password"
        if auth := cluster.spec.tiers.remote_auth:
            config["remote_password_file"] = f"{paths.REMOTE_AUTH_DIR}/password"
            if auth.username_key is not None:
                config["remote_username_file"] = f"{paths.REMOTE_AUTH_DIR}/username"
        return config

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """The list of shards, and the credentials."""
        if owner := names.remote_owner(cluster):
            # All sources are optional: if one is missing, the engine runs, and has no remote tier.
            secrets = {
                "password": names.tier_secret(cluster, owner, names.REMOTE),
                paths.AUTHORITY_FILE: names.remote_certificate(cluster),
            }
            sources = [
                {"secret": {"items": stateful.items(key), "name": secret, "optional": True}}
                for key, secret in secrets.items()
                if secret
            ]
            files = {"projected": {"sources": sources}}
            if secrets["password"]:
                listed = optional_list(owner, names.REMOTE, paths.SHARDS_FILE)
                yield Volume("remote", paths.REMOTE_DIR, listed)
            yield Volume("remote-auth", paths.REMOTE_AUTH_DIR, files)
        if auth := cluster.spec.tiers.remote_auth:
            source = secret_source(auth.name, password=auth.password_key, username=auth.username_key)
            yield Volume("remote-auth", paths.REMOTE_AUTH_DIR, source)

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether all sidecars reach the remote tier; None: no sidecar has one."""
        number, total = sum(map(self.is_present, sidecars)), len(sidecars)
        problem, lost = "sidecars cannot reach the remote tier", self.lost(sidecars)
        remedy = host_remedy(observed.resource, lost[0][1]) if lost else ""
        if failure := failure_of("RemoteTierUnreachable", problem, lost, total, remedy):
            return failure
        count = f"{number} of" if number < total else "All"
        message = f"{count} {total} sidecars can reach the remote tier."
        return Condition("True", "Reachable", message) if number else None


def host_remedy(resource: Object, problem: str) -> str:
    """Remedy for a host of an external tier that has no address; empty for other problems."""
    host = _UNRESOLVED.search(problem)
    if host is None or dig(resource, "spec", "tiers", "remote", "external") is None:
        return ""
    _, *domain = host[1].split(".")
    remedy = "Check the host in spec.tiers.remote.external.url"
    if domain[1:2] not in ([], ["svc"]):
        return remedy
    namespace = domain[0] if domain else resource["metadata"]["namespace"]
    return f"{remedy}: kubectl get service -n {namespace} lists the Services"
