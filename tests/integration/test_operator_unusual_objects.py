"""Unusual objects on a real API server: valid ones settle, broken ones do not affect others."""

import contextlib
import random
from collections.abc import Iterator
from functools import reduce

import pytest

from lmcache_operator.specs.merge import merge
from testing.kube.api import ApiError, Object
from testing.kube.audit import Request
from testing.kube.cluster import CRDS, Cluster
from tests.harness.kube import CLUSTERS, Operator, example
from tests.harness.operator.clusters import condition, written

pytestmark = pytest.mark.kube

NUM_ODD = 12
NUM_ROUNDS = 10
CRD = "lmcacheclusters.lmcache.io"
POD_PARTS: list[Object] = [
    {"hostNetwork": False, "hostPID": False, "setHostnameAsFQDN": False, "shareProcessNamespace": False},
    {"tolerations": []},
    {"tolerations": [{"operator": "Exists", "value": "", "key": ""}]},
    {"nodeSelector": {}, "imagePullSecrets": [], "hostAliases": [], "topologySpreadConstraints": []},
    {"affinity": {}},
    {"affinity": {"nodeAffinity": {}, "podAffinity": None}},
    {"dnsConfig": {"options": [{"name": "ndots", "value": None}]}},
    {"dnsConfig": {}, "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"},
    {"schedulerName": "", "priorityClassName": "", "subdomain": "", "hostname": ""},
    {"terminationGracePeriodSeconds": 0, "activeDeadlineSeconds": None},
    {"terminationGracePeriodSeconds": 30, "readinessGates": [], "overhead": {}},
    {"volumes": [{"name": "a"}, {"name": "b", "emptyDir": {"sizeLimit": "0.5Gi", "medium": ""}}]},
    {"volumes": [{"name": "c", "projected": {"sources": []}}, {"name": "d", "downwardAPI": {"items": []}}]},
    {
        "volumes": [
            {"name": "e", "configMap": {"name": "x", "defaultMode": 0, "optional": False, "items": []}}
        ]
    },
    {"volumes": [{"name": "f", "hostPath": {"path": "/x", "type": ""}}]},
    {"volumes": [{"name": "g", "persistentVolumeClaim": {"claimName": "x", "readOnly": False}}]},
]
CONTAINER_PARTS: list[Object] = [
    {"env": [{"name": "A"}, {"name": "B", "value": None}, {"name": "C", "value": ""}]},
    {"env": [{"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}], "envFrom": []},
    {"env": [{"name": "E", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}}]},
    {"envFrom": [{"prefix": "", "secretRef": {"name": "x", "optional": True}}]},
    {"resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}}},
    {"resources": {"requests": {"cpu": "0.5", "ephemeral-storage": "1e3"}}},
    {"resources": {"limits": {"cpu": 2}, "requests": {}}},
    {"livenessProbe": {"initialDelaySeconds": 0, "successThreshold": 1, "terminationGracePeriodSeconds": 1}},
    {"readinessProbe": {"httpGet": {"port": "http", "scheme": "HTTP", "httpHeaders": [], "host": ""}}},
    {"tty": False, "stdin": False, "stdinOnce": False, "workingDir": ""},
    {"ports": [{"containerPort": 9000}, {"containerPort": 9001, "hostPort": 0, "hostIP": ""}]},
    {"imagePullPolicy": "Always", "terminationMessagePath": "", "volumeDevices": []},
    {"securityContext": {"capabilities": {"add": []}, "privileged": False}},
    {"lifecycle": {"postStart": None, "preStop": {"exec": {"command": ["true"]}}}},
    {"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]},
]
METADATA: list[Object] = [
    {"labels": {}},
    {"annotations": {"empty": "", "odd": "ä\u2028\U0001f600"}},
    {"labels": {"team": "", "none": None}, "annotations": {}},
]


def odd_template(rng: random.Random) -> Object:
    container = reduce(merge, rng.sample(CONTAINER_PARTS, 4), {"name": "engine"})
    parts: list[Object] = [{"spec": part} for part in rng.sample(POD_PARTS, 4)]
    parts.append({"spec": {"containers": [container]}, "metadata": rng.choice(METADATA)})
    template: Object = reduce(merge, parts, {})
    return template


def odd_cluster(name: str, template: object) -> Object:
    resource = example()
    resource["metadata"]["name"] = name
    resource["spec"]["engine"] |= {"replicas": 0, "podTemplate": template}
    return resource


def writes_when_touched(plane: Cluster, operator: Operator, namespace: str) -> list[Request]:
    """Writes of the operator while it reconciles all clusters again."""
    before, mark = operator.num_reconciliations(), plane.mark()
    poke = {"metadata": {"annotations": {"test/poke": str(before)}}}
    for number in range(NUM_ODD):
        plane.api.patch(CLUSTERS, f"odd-{number}", poke, namespace)
    plane.wait(lambda: operator.num_reconciliations() >= before + NUM_ODD)
    return written(plane, operator, mark, namespace)


def test_odd_but_valid_templates_settle(plane, operator, namespace):
    for number in range(NUM_ODD):
        template = odd_template(random.Random(number))
        plane.api.create(CLUSTERS, odd_cluster(f"odd-{number}", template), namespace)
    degraded_reasons = plane.wait(lambda: reasons(plane, namespace, NUM_ODD))
    assert set(degraded_reasons.values()) == {"AsDeclared"}, degraded_reasons
    # A cluster that never settles triggers itself and is written in every round. A round may also contain the
    # last Events of the start, and reconciliations of clusters of earlier tests.
    rounds = (writes_when_touched(plane, operator, namespace) for _ in range(NUM_ROUNDS))
    assert any(not writes for writes in rounds)


@contextlib.contextmanager
def loose_definition(plane: Cluster) -> Iterator[None]:
    """Replace the definition's schema by one that accepts everything, as an earlier version might."""
    schema = "/spec/versions/0/schema/openAPIV3Schema"
    present = plane.api.get(CRDS, CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def put(value: Object) -> None:
        operations = [{"op": "replace", "path": schema, "value": value}]
        path = plane.api.path(CRDS, None, CRD)
        plane.api.request("PATCH", path, operations, "application/json-patch+json")

    put({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    try:
        yield
    finally:
        put(present)


def broken() -> dict[str, Object]:
    """Objects that violate the definition or are very large, by name."""
    deep: object = {}
    for _ in range(400):
        deep = {"spec": deep}
    env = [{"name": f"V{number}", "value": "x" * 100} for number in range(5000)]
    large = {"metadata": {"annotations": {"large": "x" * 200_000}}}
    specs: dict[str, object] = {
        "text": "text", "list": [1], "nothing": None, "types": {"model": 1, "tiers": []},
        "replicas": {**example()["spec"], "engine": {"replicas": "many"}},
    }  # fmt: skip
    objects = {name: example() | {"spec": spec} for name, spec in specs.items()}
    objects |= {"deep": odd_cluster("deep", deep), "large": odd_cluster("large", large)}
    objects["env"] = odd_cluster("env", {"spec": {"containers": [{"name": "engine", "env": env}]}})
    objects["conditions"] = example() | {"status": {"conditions": [{"type": "Ready"}], "images": {}}}
    for name, resource in objects.items():
        resource["metadata"] = {"name": f"broken-{name}"}
    return objects


def test_broken_objects_do_not_block_other_clusters(plane, operator, namespace):
    objects = broken()

    def refusal(resource: Object) -> str:
        try:
            plane.api.create(CLUSTERS, resource, namespace)
        except ApiError as error:
            if error.code not in (400, 422):
                raise
            return str(error)
        return ""

    with loose_definition(plane):
        # Wait until the API server has read the loose definition. Objects that it still refuses are harmless.
        first = objects.pop("types")
        plane.wait(lambda: not refusal(first))
        refused = {name: why for name, resource in objects.items() if (why := refusal(resource))}
        assert not refused.keys() & {"deep", "env", "large"}, refused
        found_reasons = plane.wait(lambda: reasons(plane, namespace, len(objects) + 1 - len(refused)))
    assert found_reasons["broken-types"] == found_reasons["broken-deep"] == "InvalidSpec", found_reasons
    assert found_reasons["broken-large"] == found_reasons["broken-env"] == "AsDeclared", found_reasons
    plane.api.create(CLUSTERS, example(), namespace)
    plane.wait(lambda: condition(plane, namespace, "Ready").get("status") == "True")


def reasons(plane: Cluster, namespace: str, number: int) -> dict[str, str]:
    """The reason of each cluster's Degraded condition. Empty until ``number`` clusters have one."""
    degraded_reasons = {}
    for resource in plane.api.objects(CLUSTERS, namespace):
        conditions = (resource.get("status") or {}).get("conditions") or []
        if degraded := [c for c in conditions if c["type"] == "Degraded"]:
            degraded_reasons[resource["metadata"]["name"]] = degraded[0]["reason"]
    return degraded_reasons if len(degraded_reasons) == number else {}
