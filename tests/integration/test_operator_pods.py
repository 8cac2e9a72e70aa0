"""Reasons why pods do not serve, in status and Events. The test plays the kubelet on a real API server."""

import pytest

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.clusters import condition, pods, reconcile_once_more, wait_ready
from tests.harness.kube import CLUSTERS, NAME, Operator, example

pytestmark = pytest.mark.kube

LAST_LINES = "INFO loading\nValueError: unknown quantization\n"


def pod_of_new_cluster(plane: Cluster, namespace: str, **spec: object) -> str:
    """Create a cluster with one pod whose status only the test writes. Returns the pod's name."""
    resource = example(**spec)
    template = {"metadata": {"annotations": {"test/hold": "true"}}}
    resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": template}
    plane.api.create(CLUSTERS, resource, namespace)
    ((_, pod),) = plane.wait(lambda: pods(plane, namespace).items())
    return str(pod["metadata"]["name"])


def events(plane: Cluster, namespace: str) -> dict[str, Object]:
    """The latest Event of each reason."""
    all_events = plane.api.objects("v1/events", namespace)
    about = [event for event in all_events if event["involvedObject"]["kind"] == "LMCacheCluster"]
    return {event["reason"]: event for event in sorted(about, key=lambda event: event["lastTimestamp"])}


def wait_reported(plane: Cluster, namespace: str, reason: str, count: int) -> None:
    plane.wait(lambda: condition(plane, namespace, "Degraded")["reason"] == reason)
    plane.wait(lambda: events(plane, namespace).get(reason, {}).get("count") == count)


def play(plane: Cluster, operator: Operator, namespace: str, pod: str, engine: Object) -> None:
    """Write the engine container's status as the kubelet would, and wait until the operator has read it."""
    status = {"containerStatuses": [{"name": "engine", "image": "e", "imageID": "", "ready": False} | engine]}
    plane.api.patch("v1/pods", f"{pod}/status", {"status": status}, namespace)
    reconcile_once_more(plane, operator, namespace)


def test_crash_loop_is_reported_once_with_its_last_lines(plane, operator, namespace):
    pod = pod_of_new_cluster(plane, namespace)
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": LAST_LINES}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    for round_ in range(1, 4):
        for state in (waiting, {"running": {}}):
            engine = {"state": state, "lastState": ended, "restartCount": round_ + (state != waiting)}
            play(plane, operator, namespace, pod, engine)
            plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "CrashLoopBackOff")
    assert "ValueError: unknown quantization" in condition(plane, namespace, "Ready")["message"]
    event = plane.wait(lambda: events(plane, namespace).get("CrashLoopBackOff"))
    assert (event["type"], event["count"]) == ("Warning", 1)
    template = plane.api.get("v1/pods", pod, namespace)["spec"]
    containers = [*template["initContainers"], *template["containers"]]
    assert {c["terminationMessagePolicy"] for c in containers} == {"FallbackToLogsOnError"}


def test_events_with_the_same_message_are_counted(plane, operator, namespace):
    resource = example()
    resource["spec"]["engine"]["replicas"] = 0
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    for count in (1, 2):
        for reason, args in (("InvalidSpec", ["--port=1"]), ("AsDeclared", [])):
            plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"args": args}}}, namespace)
            wait_reported(plane, namespace, reason, count)
    all_events = plane.api.objects("v1/events", namespace)
    assert len(all_events) == len({(e["reason"], e["message"]) for e in all_events}) <= 6


def test_unbound_claim_is_reported_with_the_message_of_its_controller(plane, operator, namespace):
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim["storageClassName"] = "none"
    plane.api.create("v1/persistentvolumeclaims", {"metadata": {"name": "models"}, "spec": claim}, namespace)
    model = {"name": "a/model", "volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    plane.api.create(CLUSTERS, example(model=model), namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "FailedBinding")
    assert (
        'claim models: storageclass.storage.k8s.io "none"' in condition(plane, namespace, "Ready")["message"]
    )


def test_pods_pull_images_with_secrets_of_their_service_account_or_of_the_spec(plane, operator, namespace):
    """The guide on private registries says so. The operator must not change a field of the ServiceAccount."""
    secrets = [{"name": "registry"}]
    resource = example(router={})
    resource["spec"]["tiers"]["remote"] = {"managed": {"memoryPerShard": "1Gi"}}
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    accounts = f"{NAME}-engine", f"{NAME}-router", "default"
    for account in accounts:
        plane.api.patch("v1/serviceaccounts", account, {"imagePullSecrets": secrets}, namespace)
    reconcile_once_more(plane, operator, namespace)
    for account in accounts:
        assert plane.api.get("v1/serviceaccounts", account, namespace)["imagePullSecrets"] == secrets
    for pod in plane.api.objects("v1/pods", namespace):
        plane.api.delete("v1/pods", pod["metadata"]["name"], namespace)

    def secrets_of_pods() -> dict[str, set[str]]:
        """Names of the Secrets that the pods of each component have."""
        by_component: dict[str, set[str]] = {}
        for pod in plane.api.objects("v1/pods", namespace):
            names = {each["name"] for each in pod["spec"].get("imagePullSecrets", [{"name": ""}])}
            by_component.setdefault(pod["metadata"]["labels"]["lmcache.io/component"], set()).update(names)
        return by_component

    plane.wait(lambda: secrets_of_pods() == {name: {"registry"} for name in ("engine", "router", "remote")})
    template = {"spec": {"imagePullSecrets": [{"name": "mine"}, {"name": "declared"}]}}
    change = {"images": {"pullSecrets": ["declared"]}, "engine": {"podTemplate": template}}
    plane.api.patch(CLUSTERS, NAME, {"spec": change}, namespace)
    expected = {"engine": {"declared", "mine"}, "router": {"declared"}}
    plane.wait(lambda: expected.items() <= secrets_of_pods().items())
