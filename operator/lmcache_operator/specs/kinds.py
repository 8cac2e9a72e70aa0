"""The kinds of objects that the operator handles, and their places in the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_operator.api import GROUP, KIND, PLURAL, PROFILE_KIND, PROFILE_PLURAL, VERSION
from lmcache_operator.specs import Object


class Kind(NamedTuple):
    """One kind of object. The group of the core API is the empty string."""

    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        """The field ``apiVersion`` of objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version


class ClusterKey(NamedTuple):
    """Identity of an LMCacheCluster. A cluster that was created again under its name has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Ref(NamedTuple):
    """Reference to a child in the namespace of its cluster."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


CLUSTER = Kind(GROUP, VERSION, KIND, PLURAL)
POD = Kind("", "v1", "Pod", "pods")
EVENT = Kind("", "v1", "Event", "events")
NODE = Kind("", "v1", "Node", "nodes")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces")
SECRET = Kind("", "v1", "Secret", "secrets")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

CHILDREN = (
    Kind("", "v1", "ServiceAccount", "serviceaccounts"),
    Kind("", "v1", "ConfigMap", "configmaps"),
    Kind("", "v1", "Service", "services"),
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("scheduling.k8s.io", "v1alpha2", "PodGroup", "podgroups"),
    Kind("apps", "v1", "StatefulSet", "statefulsets"),
    Kind("apps", "v1", "Deployment", "deployments"),
    Kind("rbac.authorization.k8s.io", "v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
    Kind("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
    Kind("cert-manager.io", "v1", "Certificate", "certificates"),
    PROFILE := Kind(GROUP, VERSION, PROFILE_KIND, PROFILE_PLURAL),
)
BY_NAME = {kind.kind: kind for kind in (CLUSTER, SECRET, *CHILDREN)}
OPTIONAL = (BY_NAME["Certificate"], BY_NAME["PodGroup"])
"""Children that an API server may not serve."""


def ref_of(rendered: Object) -> Ref:
    """The reference to an object."""
    return Ref(rendered["kind"], rendered["metadata"]["name"])


def controller_of(metadata: Mapping[str, Any]) -> Object:
    """The reference to the controlling owner of an object; empty if it has none."""
    owners = metadata.get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), {})


def controller_uid(live: Object) -> str | None:
    """The uid of the object's controlling owner; None if it has none."""
    return controller_of(live["metadata"]).get("uid")


def owner_key(namespace: str, metadata: Mapping[str, Any]) -> ClusterKey | None:
    """Key of the cluster that owns an object; None if no cluster owns it."""
    owner = controller_of(metadata)
    is_cluster = owner.get("kind") == KIND and owner["apiVersion"].startswith(f"{GROUP}/")
    return ClusterKey(namespace, owner["name"], owner["uid"]) if is_cluster else None


def is_child(live: Object, cluster: Object) -> bool:
    """Whether a cluster is the controller of an object in its namespace.

    The uid alone does not show it: a reference of an unknown kind can have any uid.
    """
    namespace, name, uid = (cluster["metadata"][key] for key in ("namespace", "name", "uid"))
    return owner_key(namespace, live["metadata"]) == (namespace, name, uid)
