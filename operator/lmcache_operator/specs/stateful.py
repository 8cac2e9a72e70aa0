"""Specs that engine pods, shards and routers share: the objects around a set of pods, and their security."""

from __future__ import annotations

from typing import Unpack

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import PeerTls, ShardTls
from lmcache_operator.api.types import Spec
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.objects import ContainerSecurity, PodSpec, PodTemplate, Probe, StatefulSetSpec

CONTAINER_SECURITY: ContainerSecurity = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
READ_ONLY_SECURITY: ContainerSecurity = CONTAINER_SECURITY | {"readOnlyRootFilesystem": True}
NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Variable that hides GPUs from a container. It is explicit, because some images default to all GPUs."""
SCRAPER_LABEL = "lmcache.io/scraper"
"""A namespace with this label set to "true" may reach metrics ports."""


def pod_spec(cluster: Cluster, component: str, **fields: Unpack[PodSpec]) -> PodSpec:
    """The spec of a component's pods: these fields, and those that all pods of the operator have."""
    spec: PodSpec = {
        # The variables of a Service named lmcache... would look like the sidecar's options, LMCACHE_*.
        "enableServiceLinks": False,
        "serviceAccountName": names.object_name(cluster.name, component),
        **fields,
    }
    if secrets := cluster.spec.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    return spec


def pod_security(cluster: Cluster, uid: int, **fields: object) -> Object:
    """Security context of a pod that runs as one user, as the restricted Pod Security Standard demands.

    If the platform assigns ids, the context has no field whose value is ``uid``.
    """
    profile = {"type": "RuntimeDefault"}
    fields |= {"runAsGroup": uid, "runAsNonRoot": True, "runAsUser": uid, "seccompProfile": profile}
    return {name: value for name, value in fields.items() if value != uid or not cluster.platform.assigns_ids}


def items(*keys: str) -> list[Object]:
    """Select these keys of a Secret or ConfigMap, as files with the same names."""
    return [{"key": key, "path": key} for key in keys]


def stateful_set(cluster: Cluster, component: str, replicas: int, template: PodTemplate) -> StatefulSetSpec:
    """Pods that start in parallel. The operator replaces outdated pods itself, one at a time."""
    return {
        "updateStrategy": {"type": "OnDelete"},
        "podManagementPolicy": "Parallel",
        "replicas": replicas,
        "selector": {"matchLabels": names.selector(cluster.name, component)},
        "serviceName": names.object_name(cluster.name, component),
        "template": template,
    }


def serving_pods(cluster: Cluster) -> dict[str, str]:
    """Labels of the engine pods that have an API server."""
    first = {names.POD_INDEX_LABEL: "0"} if cluster.num_parts > 1 else {}
    return names.selector(cluster.name, names.ENGINE) | first


def headless_service(selector: dict[str, str], *ports: Object) -> Object:
    """DNS names of pods, also of those that are not ready.

    Prometheus can then scrape a sidecar before its engine has loaded the model. No resolver caches a negative
    answer about a new shard.
    """
    return {"clusterIP": "None", "ports": list(ports), "publishNotReadyAddresses": True, "selector": selector}


def disruption_budget(selector: dict[str, str]) -> Object:
    """At most one ready pod may be evicted at a time. Evicting an unready pod interrupts no request."""
    return {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def spread_over_nodes(selector: dict[str, str]) -> Object:
    """Affinity of pods that run on different nodes if possible, so that a lost node costs few of them."""
    apart = {"labelSelector": {"matchLabels": selector}, "topologyKey": "kubernetes.io/hostname"}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"podAffinityTerm": apart, "weight": 100}]
        }
    }


def network_policy(selector: dict[str, str], *ingress: Object) -> Object:
    """Allow only this traffic to the pods, and all traffic from them."""
    return {"ingress": list(ingress), "podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"]}


def from_pods(labels: dict[str, str]) -> Object:
    """Pods of the policy's namespace with these labels."""
    return {"podSelector": {"matchLabels": labels}}


def scrapers() -> list[Object]:
    """Readers of metrics: the policy's namespace, and those with the label ``lmcache.io/scraper=true``."""
    return [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {SCRAPER_LABEL: "true"}}}]


def from_clients(spec: Spec, ports: list[Object]) -> list[Object]:
    """The rule that opens ports to the clients in the spec, by default to everybody.

    There is no rule for an empty list: Kubernetes takes an empty ``from`` for everybody.
    """
    if spec.clients is None:
        return [{"ports": ports}]
    return [{"from": spec.clients, "ports": ports}] if spec.clients else []


def certificates(
    cluster: Cluster, component: str, tls: PeerTls | ShardTls | None, host: str, secret_name: str
) -> list[Object]:
    """Certificate of cert-manager for all pods with names in ``host``; none without an issuer."""
    if not tls or not (issuer := tls.issuer_ref):
        return []
    spec = {
        "dnsNames": [f"*.{host}"],
        "issuerRef": {"group": issuer.group, "kind": issuer.kind, "name": issuer.name},
        "privateKey": {"rotationPolicy": "Always"},
        "secretName": secret_name,
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    return [names.child(cluster, component, "Certificate", spec=spec)]


def http_probe(path: str, port: int, *, period: int, failures: int, scheme: str | None = None) -> Probe:
    """A probe of an HTTP server each ``period`` seconds, which fails after ``failures`` failures."""
    request: Object = {"path": path, "port": port} | ({"scheme": scheme} if scheme else {})
    return {"failureThreshold": failures, "httpGet": request, "periodSeconds": period, "timeoutSeconds": 5}
