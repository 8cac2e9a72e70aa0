"""An engine over several nodes: a group of pods with one StatefulSet. Pure.

The pods of two groups differ in one label, and in the name of their PodGroup if they have one. Variables and
affinity refer to this label, so all groups share the rest of the template.
"""

from __future__ import annotations

from functools import partial

from lmcache_operator.api.parse import Cluster
from lmcache_operator.contract.base import Observed
from lmcache_operator.pods.pods import is_outdated
from lmcache_operator.specs import Object, names, paths, stateful
from lmcache_operator.specs.kinds import ref_of
from lmcache_operator.specs.merge import dig, merge
from lmcache_operator.specs.objects import ContainerPort, EnvVar, PodContainer, PodTemplate, Probe

SECRET_KEY = "password"
_SCHEDULER = "default-scheduler"
_LAUNCHER = ("python3", "-m", "lmcache_client.group")
_NUMBER = "LMCACHE_GROUP_NUMBER"
_FIELDS = {
    _NUMBER: f"metadata.labels['{names.GROUP_LABEL}']",
    "LMCACHE_GROUP_RANK": f"metadata.labels['{names.POD_INDEX_LABEL}']",
    # While pods are replaced, launchers of different specs do not start an engine together.
    "LMCACHE_GROUP_REVISION": f"metadata.annotations['{names.SPEC_HASH}']",
    "VLLM_HOST_IP": "status.podIP",
}
"""Variables with fields of the pod. vLLM would otherwise look up its address by a connection to a server."""


def pod_objects(
    cluster: Cluster, number: int | None, size: int, template: PodTemplate, records: dict[str, str]
) -> list[Object]:
    """The StatefulSet of ``size`` pods, after its prerequisites.

    An engine over several nodes has a ``number``, and a policy that opens all ports to its own pods.
    """
    selector, name = names.selector(cluster.name, names.ENGINE), ""
    if number is not None:
        name, label = names.group_name(cluster.name, number), {names.GROUP_LABEL: f"{number}"}
        selector, metadata = selector | label, template["metadata"]
        template = {**template, "metadata": {**metadata, "labels": metadata["labels"] | label}}
    child = partial(names.child, cluster, names.ENGINE, name=name)
    policy = stateful.network_policy(selector, {"from": [stateful.from_pods(selector)]})
    spec = stateful.stateful_set(cluster, names.ENGINE, size, template)
    spec["selector"] = {"matchLabels": selector}
    policies = [] if number is None else [child("NetworkPolicy", spec=policy)]
    return [*policies, child("StatefulSet", annotations=records, spec=spec)]


def with_pod_groups(cluster: Cluster, wanted: list[Object], observed: Observed) -> list[Object]:
    """The objects, with a PodGroup for each group: the scheduler then places either all pods or none.

    The scheduler waits until a PodGroup has all its pods, so the pods of a group must join it together. A
    running group without a PodGroup joins it with its next spec, which replaces all pods.
    """
    children = list[Object]()
    for child in wanted:
        number = names.group_number(cluster.name, child["metadata"]["name"])
        if child["kind"] == "StatefulSet" and number is not None and _is_gang(child, observed):
            name = names.pod_group_name(cluster.name, number, cluster.engine.nodes)
            spec = {"schedulingPolicy": {"gang": {"minCount": cluster.engine.nodes}}}
            children.append(names.child(cluster, names.ENGINE, "PodGroup", name, spec=spec))
            pod = {"spec": {"schedulingGroup": {"podGroupName": name}}}
            child = names.hashed(merge(child, {"spec": {"template": pod}}))
        children.append(child)
    return children


def _is_gang(stateful_set: Object, observed: Observed) -> bool:
    """Whether pods of a StatefulSet join a PodGroup; not if the user names another scheduler or a group."""
    template = stateful_set["spec"]["template"]
    live = dig(observed.children.get(ref_of(stateful_set)), "spec", "template")
    joins = live is None or is_outdated(live, template) or "schedulingGroup" in live["spec"]
    scheduler = template["spec"].get("schedulerName", _SCHEDULER)
    return joins and scheduler == _SCHEDULER and "schedulingGroup" not in template["spec"]


def group_secrets(cluster: Cluster) -> list[Object]:
    """The Secret with the password of the launchers of all groups; none if each engine is one pod."""
    name = names.created_secret(cluster, names.GROUP)
    return [names.child(cluster, names.ENGINE, "Secret", name)] if cluster.engine.nodes > 1 else []


def with_launcher(cluster: Cluster, engine: PodContainer, notice: int, shutdown: int) -> PodContainer:
    """The engine's container with a launcher, which starts and ends the engine together with the others.

    The launcher adds the options that depend on the pod. If a pod of the group terminates, all pods become
    unready, serve for ``notice`` seconds more, and have ``shutdown`` seconds to finish their requests.
    """
    fields: list[EnvVar] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FIELDS.items()
    ]
    host = names.host(cluster.name, names.ENGINE, cluster.namespace)
    values = {
        "LMCACHE_GROUP_LEADER": f"{names.object_name(cluster.name, names.ENGINE)}-$({_NUMBER})-0.{host}",
        "LMCACHE_GROUP_NODES": f"{cluster.engine.nodes}",
        "LMCACHE_GROUP_NOTICE_SECONDS": f"{notice}",
        "LMCACHE_GROUP_PORT": f"{names.GROUP_PORT}",
        "LMCACHE_GROUP_RANKS": f"{cluster.engine.parallelism.data // cluster.engine.nodes}",
        "LMCACHE_GROUP_READY_PORT": f"{names.GROUP_READY_PORT}",
        "LMCACHE_GROUP_SECRET_FILE": f"{paths.GROUP_DIR}/{SECRET_KEY}",
        "LMCACHE_GROUP_SERVER_PORT": f"{names.ENGINE_PORT}",
        "LMCACHE_GROUP_SHUTDOWN_SECONDS": f"{shutdown}",
    }
    # The startup probe watches the engine until it has started, and the liveness probe afterwards.
    ready: Probe = {"failureThreshold": 2, "periodSeconds": 2, "tcpSocket": {"port": names.GROUP_READY_PORT}}
    port: ContainerPort = {"containerPort": names.GROUP_PORT, "name": names.GROUP, "protocol": "TCP"}
    # The kubelet only expands variables that precede the value in the list.
    variables: list[EnvVar] = [{"name": name, "value": text} for name, text in values.items()]
    return engine | {
        "args": ["--", *engine["command"], *engine["args"]],
        "command": [*_LAUNCHER],
        "env": [*fields, *variables, *engine["env"]],
        "ports": [*engine["ports"], port],
        "readinessProbe": ready,
    }


def near_one_another(cluster: Cluster, topology_key: str) -> Object:
    """Affinity that places the pods of a group on nodes with the same value of a label."""
    selector = {"matchLabels": names.selector(cluster.name, names.ENGINE)}
    term = {"labelSelector": selector, "matchLabelKeys": [names.GROUP_LABEL], "topologyKey": topology_key}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
