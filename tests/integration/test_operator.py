"""The operator against a real API server, controllers and scheduler; kwok plays the kubelet."""

import time
from collections.abc import Callable, Iterator
from subprocess import CalledProcessError

import pytest
import yaml

from tests.harness.kube import CLUSTERS, EXAMPLE, NAME, Operator, example, new_namespace
from tools.kube.api import ApiError, Object
from tools.kube.cluster import Cluster, Write

pytestmark = pytest.mark.kube

ENGINE = f"{NAME}-engine"
HEAL_SECONDS = 5
REST_SECONDS = 60
CHILDREN = [
    ("v1/serviceaccounts", ENGINE),
    ("v1/configmaps", f"{NAME}-sidecar"),
    ("v1/services", ENGINE),
    ("v1/services", NAME),
    ("networking.k8s.io/v1/networkpolicies", ENGINE),
    ("policy/v1/poddisruptionbudgets", ENGINE),
    ("apps/v1/statefulsets", ENGINE),
]
EDITS: list[tuple[str, str, Object]] = [
    ("v1/serviceaccounts", ENGINE, {"automountServiceAccountToken": True}),
    ("v1/configmaps", f"{NAME}-sidecar", {"data": {"sidecar.yaml": "arena: /elsewhere"}}),
    ("v1/services", NAME, {"spec": {"selector": {"lmcache.io/cluster": "another"}}}),
    ("v1/services", ENGINE, {"metadata": {"labels": {"app.kubernetes.io/instance": "another"}}}),
    ("networking.k8s.io/v1/networkpolicies", ENGINE, {"spec": {"policyTypes": ["Egress"]}}),
    ("policy/v1/poddisruptionbudgets", ENGINE, {"spec": {"maxUnavailable": 2}}),
    ("apps/v1/statefulsets", ENGINE, {"spec": {"replicas": 5}}),
]


def condition(plane: Cluster, namespace: str, kind: str) -> Object:
    status = plane.api.get(CLUSTERS, NAME, namespace).get("status", {})
    found: Object = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return found


def wait_ready(plane: Cluster, namespace: str) -> None:
    """Until the operator has seen the present spec and says Ready."""

    def is_ready() -> bool:
        live = plane.api.get(CLUSTERS, NAME, namespace)
        ready = condition(plane, namespace, "Ready")
        seen = ready.get("observedGeneration") == live["metadata"]["generation"]
        return seen and ready["status"] == "True"

    plane.wait(is_ready)


def pods(plane: Cluster, namespace: str) -> dict[str, Object]:
    """The engine's pods by uid."""
    found = plane.api.objects("v1/pods", namespace, f"lmcache.io/cluster={NAME}")
    return {pod["metadata"]["uid"]: pod for pod in found}


def look_once_more(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Make the operator look at the cluster again, by a change that means nothing, and wait until it did."""
    before = operator.num_looks()
    note = {"metadata": {"annotations": {"test/poke": str(time.monotonic_ns())}}}
    plane.api.patch(CLUSTERS, NAME, note, namespace)
    plane.wait(lambda: operator.num_looks() > before)


def wait_quiet(plane: Cluster, operator: Operator, namespace: str) -> None:
    """Until a look at the cluster writes nothing: it has told all it had to tell."""

    def is_quiet() -> bool:
        mark = plane.mark()
        look_once_more(plane, operator, namespace)
        return not written(plane, operator, mark, namespace)

    plane.wait(is_quiet)


def written(plane: Cluster, operator: Operator, mark: int, namespace: str) -> list[Write]:
    return plane.written_since(mark, by=operator.user, namespace=namespace)


@pytest.fixture(scope="module")
def shared(plane: Cluster, operator_process: Operator) -> Iterator[str]:
    """A namespace with the example, Ready: for tests that leave it as they found it."""
    if not operator_process.is_running:
        operator_process.start()
    with new_namespace(plane, "shared") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)
        yield namespace


@pytest.fixture(scope="module")
def resting(plane: Cluster, shared: str, operator_process: Operator) -> Iterator[tuple[str, int, float]]:
    """A cluster that nobody touches, with the moment since when: it rests while the other tests run."""
    with new_namespace(plane, "resting") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)
        wait_quiet(plane, operator_process, namespace)
        yield namespace, plane.mark(), time.monotonic()


@pytest.fixture(autouse=True)
def _rests_from_the_start(resting: tuple[str, int, float], operator: Operator) -> None:
    """The resting cluster is made before the first test; the operator runs in each."""


def test_example_gets_all_its_children_and_becomes_ready(plane, operator, namespace):
    plane.kubectl("apply", "--namespace", namespace, "--filename", EXAMPLE)
    plane.wait(lambda: all(plane.api.find(kind, name, namespace) for kind, name in CHILDREN), HEAL_SECONDS)
    plane.kubectl(
        "wait", "--namespace", namespace, f"lmcluster/{NAME}", "--for=condition=Ready", "--timeout=30s"
    )
    live = plane.api.get(CLUSTERS, NAME, namespace)
    assert live["status"]["replicas"] == 2
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    assert live["metadata"].get("finalizers", []) == []
    # All that `kubectl apply` and the API server put there: the operator marks no object of the user.
    assert set(live["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    for pod in pods(plane, namespace).values():
        assert pod["spec"]["initContainers"][0]["name"] == "sidecar"
        assert pod["spec"]["nodeName"].startswith("node-")


def test_children_are_what_render_prints_without_a_cluster(plane, operator, shared):
    from lmcache_operator.api.parse import parse
    from lmcache_operator.specs.children import children
    from lmcache_operator.specs.kinds import CHILDREN as KINDS
    from lmcache_operator.specs.names import STOCK_IMAGES

    resource = plane.api.get(CLUSTERS, NAME, shared)
    wanted = {(c["kind"], c["metadata"]["name"]) for c in children(parse(resource), STOCK_IMAGES)}
    live = {
        (kind.kind, found["metadata"]["name"])
        for kind in KINDS
        for found in plane.api.objects(
            f"{kind.api_version}/{kind.plural}", shared, f"lmcache.io/cluster={NAME}"
        )
    }
    assert live == wanted
    assert len(CHILDREN) == len(wanted)


def test_get_shows_what_matters(plane, operator, shared):
    header, row = plane.kubectl("get", "lmcluster", "--namespace", shared).splitlines()
    columns = dict(zip(header.split(), row.split(), strict=True))
    shown = {column: columns[column] for column in ("NAME", "DESIRED", "READY", "STATUS", "MEMORY")}
    assert shown == {"NAME": NAME, "DESIRED": "2", "READY": "2", "STATUS": "Ready", "MEMORY": "64Gi"}


def test_restart_writes_nothing(plane, operator, shared):
    wait_quiet(plane, operator, shared)
    mark = plane.mark()
    assert operator.stop() == 0
    operator.start()
    plane.wait(lambda: operator.num_looks() >= operator.metric("lmcache_operator_clusters") > 0)
    look_once_more(plane, operator, shared)
    assert written(plane, operator, mark, shared) == []


@pytest.mark.parametrize(("kind", "name"), CHILDREN)
def test_deleted_child_comes_back(plane, operator, shared, kind, name):
    gone = plane.api.get(kind, name, shared)["metadata"]["uid"]
    plane.api.delete(kind, name, shared)

    def is_back() -> bool:
        return bool(plane.api.get(kind, name, shared)["metadata"]["uid"] != gone)

    plane.wait(is_back, HEAL_SECONDS)
    wait_ready(plane, shared)


@pytest.mark.parametrize(("kind", "name", "edit"), EDITS)
def test_edited_child_is_healed(plane, operator, shared, kind, name, edit):
    def content() -> Object:
        live = plane.api.get(kind, name, shared)
        for volatile in ("managedFields", "resourceVersion", "generation"):
            live["metadata"].pop(volatile, None)
        live.pop("status", None)
        return live

    before = content()
    plane.api.patch(kind, name, edit, shared)
    plane.wait(lambda: content() == before, HEAL_SECONDS)
    wait_ready(plane, shared)


def test_scale(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    plane.kubectl("scale", "--namespace", namespace, f"lmcluster/{NAME}", "--replicas=3")
    wait_ready(plane, namespace)
    assert plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["replicas"] == 3
    scale = plane.api.request("GET", plane.api.path(CLUSTERS, namespace, f"{NAME}/scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 3
    # What an autoscaler counts: the selector finds exactly the engine's pods.
    assert len(plane.api.objects("v1/pods", namespace, scale["status"]["selector"])) == 3


def test_resizing_the_cache_restarts_no_engine(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    before = set(pods(plane, namespace))
    revision = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["status"]["updateRevision"]
    plane.api.patch(CLUSTERS, NAME, {"spec": {"tiers": {"memory": {"size": "32Gi"}}}}, namespace)

    def is_new_template() -> bool:
        status = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["status"]
        return bool(status["updateRevision"] != revision)

    plane.wait(is_new_template)
    wait_ready(plane, namespace)
    look_once_more(plane, operator, namespace)
    assert set(pods(plane, namespace)) == before
    plane.wait(lambda: condition(plane, namespace, "Progressing")["reason"] == "ResizePending")
    assert "2 still have the former size" in condition(plane, namespace, "Ready")["message"]


def test_new_image_replaces_every_pod_through_eviction(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    before, mark = set(pods(plane, namespace)), plane.mark()
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": "vllm/vllm-openai:v0.31.0"}}}, namespace)
    plane.wait(lambda: not before & set(pods(plane, namespace)))
    wait_ready(plane, namespace)
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(plane, namespace).values()}
    assert images == {"vllm/vllm-openai:v0.31.0"}
    assert len([w for w in written(plane, operator, mark, namespace) if w.resource == "pods/eviction"]) >= 2
    assert not [w for w in written(plane, operator, mark, namespace) if w.resource == "pods"]


@pytest.mark.parametrize("is_running", [True, False], ids=["operator-running", "operator-down"])
def test_delete_leaves_nothing(plane, operator, namespace, is_running):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    if not is_running:
        operator.kill()
    plane.kubectl("delete", "--namespace", namespace, f"lmcluster/{NAME}", "--timeout=20s")
    selector = f"lmcache.io/cluster={NAME}"
    kinds = {kind for kind, _ in CHILDREN} | {"v1/pods"}
    plane.wait(lambda: not any(plane.api.objects(kind, namespace, selector) for kind in kinds))


def _set(path: str, value: object) -> Callable[[Object], None]:
    def change(resource: Object) -> None:
        *parents, last = path.split(".")
        node = resource
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    return change


REDIS = {"url": "redis://redis:6379/0"}
REFUSED = [
    ("spec.tiers.memory.size", "64Gigs", "spec.tiers.memory.size"),
    ("spec.tiers.memory.size", "1Ki", "spec.tiers.memory.size"),
    (
        "spec.tiers.remote",
        {"external": REDIS, "managed": {"shards": 1, "memoryPerShard": "1Gi"}},
        "exactly one",
    ),
    ("spec.tiers.remote", {}, "exactly one"),
    ("spec.engine.parallelism", {"tensor": 2, "pipeline": 2}, "must equal gpu.count"),
    ("spec.engine.gpu.count", 3, "must equal gpu.count"),
    ("spec.engine.replicas", -1, "spec.engine.replicas"),
    ("spec.engine.args", ["--tensor-parallel-size=2"], "parallelism"),
    ("spec.sidecar", {"chunkTokens": 17}, "chunkTokens"),
    ("spec.model.name", "", "spec.model.name"),
    ("metadata.name", "8b", "name"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_invalid_object_is_refused_by_the_api_server(plane, shared, path, value, message):
    resource = example()
    resource["metadata"]["name"] = "invalid"
    _set(path, value)(resource)
    with pytest.raises(ApiError, match=message) as refused:
        plane.api.create(CLUSTERS, resource, shared)
    assert refused.value.code == 422


def test_unknown_field_is_refused_by_kubectl(plane, shared):
    resource = example()
    resource["spec"]["engine"]["replica"] = 3
    with pytest.raises(CalledProcessError) as refused:
        plane.kubectl("apply", "--namespace", shared, "--filename", "-", stdin=yaml.safe_dump(resource))
    assert 'unknown field "spec.engine.replica"' in refused.value.stderr


def test_model_cannot_be_changed(plane, operator, shared):
    with pytest.raises(ApiError, match=r"spec.model.name.*cannot be changed"):
        plane.api.patch(CLUSTERS, NAME, {"spec": {"model": {"name": "another/model"}}}, shared)


ZERO_VALUES = {
    "hostNetwork": False,
    "tolerations": [{"key": "gpu", "operator": "Exists", "value": ""}],
    "volumes": [{"name": "extra", "persistentVolumeClaim": {"claimName": "x", "readOnly": False}}],
    "containers": [
        {
            "name": "engine",
            "env": [
                {"name": "EMPTY", "value": ""},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": 1}}},
            ],
            "volumeMounts": [{"name": "extra", "mountPath": "/extra", "subPath": "", "readOnly": False}],
            "livenessProbe": {"initialDelaySeconds": 0},
            "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}},
        }
    ],
}


def test_rest_is_what_the_api_server_made_of_what_was_applied(plane, operator, namespace):
    """It drops zero values and spells quantities anew; neither is a change that somebody made."""
    resource = example()
    resource["spec"]["engine"]["podTemplate"] = {"spec": ZERO_VALUES}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: plane.api.find("apps/v1/statefulsets", ENGINE, namespace))
    wait_quiet(plane, operator, namespace)
    mark = plane.mark()
    assert operator.stop() == 0
    operator.start()
    plane.wait(lambda: operator.num_looks() >= operator.metric("lmcache_operator_clusters") > 0)
    look_once_more(plane, operator, namespace)
    assert written(plane, operator, mark, namespace) == []
    # But what somebody does change, to a zero value or from one, is healed.
    edit = {"spec": {"template": {"spec": {"hostNetwork": True, "automountServiceAccountToken": None}}}}
    plane.api.patch("apps/v1/statefulsets", ENGINE, edit, namespace)

    def is_healed() -> bool:
        pod = plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["template"]["spec"]
        return not pod.get("hostNetwork") and pod.get("automountServiceAccountToken") is False

    plane.wait(is_healed, HEAL_SECONDS)


def test_a_contested_field_keeps_no_other_from_being_applied(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    for _ in range(10):
        plane.api.patch("apps/v1/statefulsets", ENGINE, {"spec": {"replicas": 1}}, namespace)
        look_once_more(plane, operator, namespace)
    assert "spec.replicas" in condition(plane, namespace, "Degraded")["message"]
    assert condition(plane, namespace, "Degraded")["reason"] == "FieldContested"
    image = "vllm/vllm-openai:v0.31.0"
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": image}}}, namespace)

    def is_rolled_out() -> bool:
        found = pods(plane, namespace).values()
        return bool(found) and all(pod["spec"]["containers"][0]["image"] == image for pod in found)

    plane.wait(is_rolled_out)
    assert plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["replicas"] == 1


def test_a_deletion_fight_is_damped(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    mark = plane.mark()
    for _ in range(20):
        if plane.api.find("policy/v1/poddisruptionbudgets", ENGINE, namespace):
            plane.api.delete("policy/v1/poddisruptionbudgets", ENGINE, namespace)
        look_once_more(plane, operator, namespace)
    made = [w for w in written(plane, operator, mark, namespace) if w.resource == "poddisruptionbudgets"]
    assert len(made) <= 4
    assert "deleting" in condition(plane, namespace, "Degraded")["message"]


def told_events(plane: Cluster, namespace: str) -> set[tuple[str, str]]:
    events = plane.api.objects("v1/events", namespace)
    return {(e["type"], e["reason"]) for e in events if e["involvedObject"]["kind"] == "LMCacheCluster"}


def test_what_the_api_server_refuses_is_told_in_its_words(plane, operator, namespace):
    resource = example()
    resource["spec"]["engine"]["podTemplate"] = {"spec": {"priorityClassName": "Bad_Name"}}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "Refused")
    assert "priorityClassName" in condition(plane, namespace, "Ready")["message"]
    plane.wait(lambda: ("Warning", "Refused") in told_events(plane, namespace))


def test_what_a_webhook_keeps_from_being_made_is_told_and_heals(plane, operator, namespace):
    kind, name = "admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", "down"
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["statefulsets"]}
    hook = {
        "name": "down.example.com", "rules": [rule], "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None", "admissionReviewVersions": ["v1"],
    }  # fmt: skip
    plane.api.create(kind, {"metadata": {"name": name}, "webhooks": [hook]})
    try:
        plane.api.create(CLUSTERS, example(), namespace)
        plane.wait(lambda: "down.example.com" in condition(plane, namespace, "Degraded").get("message", ""))
    finally:
        plane.api.delete(kind, name)
    wait_ready(plane, namespace)


def test_two_disruption_budgets_that_block_evictions_are_told(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    selector = plane.api.get("policy/v1/poddisruptionbudgets", ENGINE, namespace)["spec"]["selector"]
    budget = {"metadata": {"name": "second"}, "spec": {"maxUnavailable": 1, "selector": selector}}
    plane.api.create("policy/v1/poddisruptionbudgets", budget, namespace)
    plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"image": "e:2"}}}, namespace)
    plane.wait(
        lambda: "more than one PodDisruptionBudget" in condition(plane, namespace, "Degraded")["message"]
    )


def test_why_pods_cannot_be_made_is_told(plane, operator, namespace):
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    plane.api.create("v1/resourcequotas", quota, namespace)
    plane.wait(lambda: "hard" in plane.api.get("v1/resourcequotas", "none", namespace).get("status", {}))
    plane.api.create(CLUSTERS, example(), namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "FailedCreate")
    assert "exceeded quota: none" in condition(plane, namespace, "Ready")["message"]


def test_a_pod_that_fits_no_node_is_told(plane, operator, namespace):
    plane.api.create(
        CLUSTERS, example(engine={"gpu": {"count": 16}, "parallelism": {"tensor": 16}}), namespace
    )
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "Unschedulable")
    assert "Insufficient nvidia.com/gpu" in condition(plane, namespace, "Ready")["message"]


def test_a_missing_secret_is_told_in_the_kubelets_words_and_heals(plane, operator, namespace):
    """The test plays the kubelet: nothing is mounted here."""
    resource = example(model={"name": "a/model", "tokenSecretRef": {"name": "hub", "key": "token"}})
    template = {"metadata": {"annotations": {"test/hold": "true"}}}
    resource["spec"]["engine"] |= {"replicas": 1, "podTemplate": template}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: pods(plane, namespace))
    ((uid, pod),) = pods(plane, namespace).items()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    message = 'MountVolume.SetUp failed for volume "hub-token" : secret "hub" not found'
    about = {"kind": "Pod", "name": pod["metadata"]["name"], "namespace": namespace, "uid": uid}
    event = {"metadata": {"name": "x"}, "type": "Warning", "reason": "FailedMount", "message": message}
    plane.api.create("v1/events", event | {"involvedObject": about, "lastTimestamp": now}, namespace)
    plane.wait(lambda: condition(plane, namespace, "Degraded").get("reason") == "FailedMount")
    assert 'secret "hub" not found' in condition(plane, namespace, "Ready")["message"]
    pod_path = f"{pod['metadata']['name']}"
    plane.api.patch("v1/pods", pod_path, {"metadata": {"annotations": {"test/hold": "no"}}}, namespace)
    wait_ready(plane, namespace)
    assert condition(plane, namespace, "Degraded")["status"] == "False"


def test_nothing_is_made_in_a_namespace_that_is_being_deleted(plane, operator):
    with new_namespace(plane, "ending") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)
        # As namespaces end: it is marked first, then everything in it goes in no order.
        plane.api.patch("v1/namespaces", namespace, {"metadata": {"finalizers": ["test/hold"]}})
        mark = plane.mark()
        plane.api.patch(CLUSTERS, NAME, {"metadata": {"finalizers": ["test/hold"]}}, namespace)
        plane.api.delete("v1/namespaces", namespace)
        plane.wait(lambda: not plane.api.find("v1/services", NAME, namespace))
        plane.api.patch(CLUSTERS, NAME, {"metadata": {"finalizers": None}}, namespace)
        plane.wait(lambda: not plane.api.find(CLUSTERS, NAME, namespace))
        made = [
            w
            for w in written(plane, operator, mark, namespace)
            if w.verb == "patch" and "/status" not in w.uri
        ]
        assert made == []
        plane.api.patch("v1/namespaces", namespace, {"metadata": {"finalizers": None}})


def test_operator_lives_through_a_restart_of_the_api_server(plane, operator, shared):
    plane.kill("kube-apiserver")
    plane.restart("kube-apiserver")
    plane.api.delete("v1/configmaps", f"{NAME}-sidecar", shared)
    plane.wait(lambda: plane.api.find("v1/configmaps", f"{NAME}-sidecar", shared))
    wait_ready(plane, shared)
    operator.forgive()


def test_nothing_is_written_at_rest(plane, operator, resting):
    """The last test: the cluster has rested while the others ran, through restarts of both servers."""
    namespace, mark, since = resting
    remaining = REST_SECONDS - (time.monotonic() - since)
    while remaining > 0:
        time.sleep(min(1.0, remaining))
        plane.check()
        remaining = REST_SECONDS - (time.monotonic() - since)
    look_once_more(plane, operator, namespace)
    assert written(plane, operator, mark, namespace) == []
