"""A platform that assigns users and groups, on a real kubelet: a policy gives pods the ids of OpenShift."""

from collections.abc import Iterator

import pytest

from testing.child_process import REPOSITORY
from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node import app as node_app
from testing.node.app import NAMESPACE, App
from testing.node.cluster import NodeCluster
from tests.harness.operator.pods import hit, prompt

UID = 1000800000
PROMPT = prompt(61, 2048)
_POLICIES = "admissionregistration.k8s.io/v1/mutatingadmissionpolic"
_IDS = f"securityContext: Object.spec.securityContext{{runAsUser: {UID}, fsGroup: {UID}}}"
_PYTHON = str(REPOSITORY / ".venv/bin/python")
_CACHES = """
import os, pathlib, torch._inductor.runtime.cache_dir_utils as inductor, vllm.envs
for folder in (os.environ["HOME"], inductor.default_cache_dir(), vllm.envs.VLLM_CACHE_ROOT):
    path = pathlib.Path(folder, "of-the-test")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    print(path, "written")
"""
FOLDERS = {
    "engine": "/dev/shm /run/lmcache /var/lib/lmcache $HOME",
    "sidecar": "/run/lmcache /var/lib/lmcache",
}


def policy() -> dict[str, object]:
    """The part of OpenShift's ``restricted-v2`` that assigns a pod's user and fsGroup."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    mutation = {"expression": f"Object{{spec: Object.spec{{{_IDS}}}}}"}
    return {
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "no-user", "expression": "!has(object.spec.securityContext.runAsUser)"}],
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": mutation}],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
    }


@pytest.fixture(scope="module")
def assigning(installed) -> Iterator[NodeCluster]:
    """The node with the policy, and with the chart's value for such platforms."""
    names = [NAMESPACE, SYSTEM_NAMESPACE]
    selector = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": names}
    resources = {"namespaceSelector": {"matchExpressions": [selector]}}
    binding = {"policyName": "ids", "matchResources": resources}
    for kind, spec in (("ies", policy()), ("ybindings", binding)):
        installed.api.create(f"{_POLICIES}{kind}", {"metadata": {"name": "ids"}, "spec": spec})
    node_app.install(installed, "--set", "assignedIds=true")
    yield installed
    for kind in ("ybindings", "ies"):
        installed.api.delete(f"{_POLICIES}{kind}", "ids")
    node_app.install(installed)


@pytest.fixture(scope="module")
def app(assigning, make_app, references) -> Iterator[App]:
    managed = {"shards": 2, "memoryPerShard": "512Mi", "image": references["redis"]}
    managed |= {"resources": {"requests": {"cpu": "50m"}}}
    app = make_app("assigned", remote={"managed": managed})
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    app.spec["spec"]["router"] = {"policy": "CacheAware", "replicas": 1, "resources": small}
    app.apply()
    yield app
    app.delete()


def test_operator_runs_with_the_assigned_user(assigning):
    def users() -> set[int | None]:
        pods = assigning.api.objects("v1/pods", SYSTEM_NAMESPACE)
        return {pod["spec"]["securityContext"].get("runAsUser") for pod in pods}

    assigning.wait(lambda: users() == {UID}, 120)  # the pods of the first installation end


def test_engine_hits_with_the_assigned_user(app):
    pod = app.ready_pod()
    security = pod.object["spec"]["securityContext"]
    assert (security["runAsUser"], security["fsGroup"], "runAsGroup" in security) == (UID, UID, False)
    for container, folders in FOLDERS.items():
        # Files of the image's user would be refused here. Group 0 is what a user without an entry gets.
        ids = pod.exec(
            container, "sh", "-ec", f"for f in {folders}; do touch $f/x; rm $f/x; done; id -u; id -g"
        )
        assert ids.split() == [f"{UID}", "0"]
    assert pod.exec("engine", _PYTHON, "-c", _CACHES).count("written") == 3
    cold = pod.complete(PROMPT)
    assert cold.num_cached == 0
    hit(pod, PROMPT, cold)
    app.node.wait(lambda: pod.stats()["remote"]["written"] >= len(PROMPT) // 256, 120)
    app.wait_condition("RouterAvailable")
    app.wait_condition("RemoteTierAvailable")
    users = {
        each["spec"]["securityContext"]["runAsUser"] for each in app.node.api.objects("v1/pods", NAMESPACE)
    }
    assert users == {UID}, "engine, router and servers of the remote tier"
