"""Odd objects, against a real API server: valid ones come to rest, broken ones stop no other."""

import contextlib
import random
from collections.abc import Iterator
from functools import reduce

import pytest
from lmcache_operator.specs.merge import merge

from testing.kube.api import ApiError, Object
from testing.kube.cluster import CRDS, Cluster, Write
from tests.harness.clusters import condition, written
from tests.harness.kube import CLUSTERS, Operator, example

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


def odd_template(chance: random.Random) -> Object:
    container = reduce(merge, chance.sample(CONTAINER_PARTS, 4), {"name": "engine"})
    parts: list[Object] = [{"spec": part} for part in chance.sample(POD_PARTS, 4)]
    parts.append({"spec": {"containers": [container]}, "metadata": chance.choice(METADATA)})
    found: Object = reduce(merge, parts, {})
    return found


def odd_cluster(name: str, template: object) -> Object:
    resource = example()
    resource["metadata"]["name"] = name
    resource["spec"]["engine"] |= {"replicas": 0, "podTemplate": template}
    return resource


def writes_when_touched(plane: Cluster, operator: Operator, namespace: str) -> list[Write]:
    """What is written while all clusters are reconciled again."""
    before, mark = operator.num_reconciliations(), plane.mark()
    poke = {"metadata": {"annotations": {"test/poke": str(before)}}}
    for number in range(NUM_ODD):
        plane.api.patch(CLUSTERS, f"odd-{number}", poke, namespace)
    plane.wait(lambda: operator.num_reconciliations() >= before + NUM_ODD)
    return written(plane, operator, mark, namespace)


def test_odd_but_valid_templates_come_to_rest(plane, operator, namespace):
    for number in range(NUM_ODD):
        template = odd_template(random.Random(number))
        plane.api.create(CLUSTERS, odd_cluster(f"odd-{number}", template), namespace)
    told = plane.wait(lambda: reasons(plane, namespace, NUM_ODD))
    assert set(told.values()) == {"AsDeclared"}, told
    # What is never at rest wakes itself: it is written in every round. One round may also see the last Events
    # of the beginning, and the operator looks at clusters of earlier tests meanwhile.
    rounds = (writes_when_touched(plane, operator, namespace) for _ in range(NUM_ROUNDS))
    assert any(not writes for writes in rounds)


@contextlib.contextmanager
def loose_definition(plane: Cluster) -> Iterator[None]:
    """The definition lets everything through meanwhile, as one of an earlier version might have."""
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
    """By name: objects that fit no definition of ours, or are very large."""
    deep: object = {}
    for _ in range(400):
        deep = {"spec": deep}
    env = [{"name": f"V{number}", "value": "x" * 100} for number in range(5000)]
    large = {"metadata": {"annotations": {"large": "x" * 200_000}}}
    specs: dict[str, object] = {
        "text": "text", "list": [1], "nothing": None, "types": {"model": 1, "tiers": []},
        "replicas": {**example()["spec"], "engine": {"replicas": "many"}},
    }  # fmt: skip
    found = {name: example() | {"spec": spec} for name, spec in specs.items()}
    found |= {"deep": odd_cluster("deep", deep), "large": odd_cluster("large", large)}
    found["env"] = odd_cluster("env", {"spec": {"containers": [{"name": "engine", "env": env}]}})
    found["conditions"] = example() | {"status": {"conditions": [{"type": "Ready"}], "images": {}}}
    for name, resource in found.items():
        resource["metadata"] = {"name": f"broken-{name}"}
    return found


def test_broken_objects_stop_no_other(plane, operator, namespace):
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
        # When the API server has seen the loose definition; what it refuses even then is no danger.
        first = objects.pop("types")
        plane.wait(lambda: not refusal(first))
        refused = {name: why for name, resource in objects.items() if (why := refusal(resource))}
        assert not refused.keys() & {"deep", "env", "large"}, refused
        told = plane.wait(lambda: reasons(plane, namespace, len(objects) + 1 - len(refused)))
    assert told["broken-types"] == told["broken-deep"] == "InvalidSpec", told
    assert told["broken-large"] == told["broken-env"] == "AsDeclared", told
    plane.api.create(CLUSTERS, example(), namespace)
    plane.wait(lambda: condition(plane, namespace, "Ready").get("status") == "True")


def reasons(plane: Cluster, namespace: str, number: int) -> dict[str, str]:
    """Why each cluster is degraded, or not; nothing before all have been looked at."""
    found = {}
    for resource in plane.api.objects(CLUSTERS, namespace):
        conditions = (resource.get("status") or {}).get("conditions") or []
        if degraded := [c for c in conditions if c["type"] == "Degraded"]:
            found[resource["metadata"]["name"]] = degraded[0]["reason"]
    return found if len(found) == number else {}
