"""The operator on a real API server with real controllers and scheduler. kwok plays the kubelet."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from testing.child_process import answers
from testing.kube.api import Object
from testing.kube.cluster import Cluster
from testing.kube.operator import RELEASE, SYSTEM_NAMESPACE
from tests.harness.commands.plugin import LIST_PODS, READ, Commands, kubeconfig_with
from tests.harness.kube import CLUSTERS, EXAMPLE, NAME, Operator, example, helm_error, new_namespace
from tests.harness.operator.clusters import (
    ENGINE,
    condition,
    pods,
    reconcile_once_more,
    wait_quiet,
    wait_ready,
    written,
)

pytestmark = pytest.mark.kube

NUM_RESYNCS = 5
CHILDREN = [
    ("v1/serviceaccounts", ENGINE),
    ("v1/configmaps", f"{NAME}-sidecar"),
    ("v1/services", ENGINE),
    ("v1/services", NAME),
    ("networking.k8s.io/v1/networkpolicies", ENGINE),
    ("policy/v1/poddisruptionbudgets", ENGINE),
    ("apps/v1/statefulsets", ENGINE),
    ("lmcache.io/v1alpha1/lmcacheprofiles", f"{NAME}-injection"),
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


@pytest.fixture(scope="module")
def shared(plane: Cluster, operator_process: Operator) -> Iterator[str]:
    """A namespace with the example, Ready. Tests that use it must restore what they change."""
    if not operator_process.is_running:
        operator_process.start()
    with new_namespace(plane, "shared") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)
        yield namespace


def test_operator_answers_probes_and_scrapes_on_ipv4_and_ipv6(operator):
    pages = (f"{operator.health_port}/healthz", f"{operator.metrics_port}/metrics")
    assert all(answers(f"http://{host}:{page}") for host in ("127.0.0.1", "[::1]") for page in pages)


@pytest.fixture(scope="module")
def idle(plane: Cluster, shared: str, operator_process: Operator) -> Iterator[tuple[str, int]]:
    """An idle cluster, with the log mark since when it is idle while other tests run."""
    with new_namespace(plane, "idle") as namespace:
        plane.api.create(CLUSTERS, example(), namespace)
        wait_ready(plane, namespace)
        wait_quiet(plane, operator_process, namespace)
        yield namespace, plane.mark()


@pytest.fixture(autouse=True)
def _idle_from_the_start(idle: tuple[str, int], operator: Operator) -> None:
    """Create the idle cluster before the first test. Every test has a running operator."""


def test_example_gets_all_children_and_becomes_ready(plane, operator, namespace):
    plane.kubectl("apply", "--namespace", namespace, "--filename", EXAMPLE)
    plane.wait(lambda: all(plane.api.find(kind, name, namespace) for kind, name in CHILDREN))
    for condition_ in ("Ready", "Progressing=False"):
        wait = ("--namespace", namespace, f"--for=condition={condition_}", "--timeout=300s")
        plane.kubectl("wait", f"lmcluster/{NAME}", *wait)
    live = plane.api.get(CLUSTERS, NAME, namespace)
    assert live["status"]["replicas"] == 2
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    assert live["metadata"].get("finalizers", []) == []
    # Only `kubectl apply` sets annotations: the operator writes nothing into the user's object.
    assert set(live["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    for pod in pods(plane, namespace).values():
        assert pod["spec"]["initContainers"][0]["name"] == "sidecar"
        assert pod["spec"]["nodeName"].startswith("node-")


def columns(plane: Cluster, namespace: str) -> dict[str, str]:
    """The first columns of ``kubectl get -o wide``, none of which is empty."""
    header, row = plane.kubectl("get", "lmcluster", "--namespace", namespace, "-o", "wide").splitlines()
    return dict(zip(header.split()[:11], row.split()[:11], strict=True))


def test_kubectl_get_prints_size_readiness_and_memory(plane, operator, shared):
    plane.wait(lambda: "lastHeartbeatTime" in plane.api.get(CLUSTERS, NAME, shared)["status"])
    header, row = plane.kubectl("get", "lmcluster", "--namespace", shared).splitlines()
    columns = dict(zip(header.split(), row.split(), strict=True))
    printed = {
        column: columns[column] for column in ("NAME", "DESIRED", "READY", "STATUS", "DEGRADED", "MEMORY")
    }
    status = {"STATUS": "Ready", "DEGRADED": "AsDeclared"}
    assert printed == {"NAME": NAME, "DESIRED": "2", "READY": "2", **status, "MEMORY": "64Gi"}


def test_status_and_columns_show_that_no_operator_works(plane, operator, namespace):
    """The user may read only his namespace, and therefore not the operator's Lease."""
    plane.api.create(CLUSTERS, example(autoscaling={"mode": "Off"}), namespace)
    wait_ready(plane, namespace)
    kubeconfig = kubeconfig_with(plane, namespace, "reader", [READ, LIST_PODS])
    status = Commands(plane, namespace, kubeconfig)
    title = f"{namespace}/{NAME}  Ready"

    def is_confirmed() -> bool:
        return status("status").stdout.startswith(title) and columns(plane, namespace)["HEARTBEAT"][-1] == "s"

    plane.wait(is_confirmed)
    operator.kill()
    beat = (datetime.now(UTC) - timedelta(minutes=3)).strftime("%Y-%m-%dT%H:%M:%SZ")  # as if time had passed
    plane.api.patch(CLUSTERS, f"{NAME}/status", {"status": {"lastHeartbeatTime": beat}}, namespace)
    plane.kubectl("scale", "--namespace", namespace, f"lmcluster/{NAME}", "--replicas=3")
    first, _, rest = status("status").stdout.partition("\n\n")
    about = "the conditions are 3 minutes old, and your last change is not applied."
    command = f"-> kubectl lmcache doctor --kubeconfig={kubeconfig} -n {namespace} {NAME}"
    assert " ".join(first.split()) == f"No operator works on {namespace}/{NAME}: {about} {command}"
    assert command in first.splitlines(), "a line that can be pasted"
    assert rest.startswith(f"{namespace}/{NAME}  Serving (2 of 3)  ")
    shown = columns(plane, namespace)
    assert shown["HEARTBEAT"].startswith("3m")
    assert (shown["GENERATION"], shown["OBSERVED"]) == ("2", "1")
    operator.start()
    wait_ready(plane, namespace)
    plane.wait(is_confirmed)


def test_operator_restart_writes_nothing(plane, operator, shared):
    wait_quiet(plane, operator, shared)
    mark = plane.mark()
    assert operator.terminate() == 0
    operator.start()
    plane.wait(lambda: operator.num_reconciliations() >= operator.metric("lmcache_operator_clusters") > 0)
    reconcile_once_more(plane, operator, shared)
    assert written(plane, operator, mark, shared) == []


@pytest.mark.parametrize(("kind", "name"), CHILDREN)
def test_deleted_child_is_recreated(plane, operator, shared, kind, name):
    deleted_uid = plane.api.get(kind, name, shared)["metadata"]["uid"]
    plane.api.delete(kind, name, shared)

    def is_recreated() -> bool:
        return bool(plane.api.get(kind, name, shared)["metadata"]["uid"] != deleted_uid)

    plane.wait(is_recreated)
    wait_ready(plane, shared)


@pytest.mark.parametrize(("kind", "name", "edit"), EDITS)
def test_edited_child_is_restored(plane, operator, shared, kind, name, edit):
    def content() -> Object:
        live = plane.api.get(kind, name, shared)
        for volatile in ("managedFields", "resourceVersion", "generation"):
            live["metadata"].pop(volatile, None)
        live.pop("status", None)
        return live

    before = content()
    plane.api.patch(kind, name, edit, shared)
    plane.wait(lambda: content() == before)
    wait_ready(plane, shared)


def test_kubectl_scale_changes_the_number_of_engine_pods(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    plane.kubectl("scale", "--namespace", namespace, f"lmcluster/{NAME}", "--replicas=3")
    wait_ready(plane, namespace)
    assert plane.api.get("apps/v1/statefulsets", ENGINE, namespace)["spec"]["replicas"] == 3
    scale = plane.api.request("GET", plane.api.path(CLUSTERS, namespace, f"{NAME}/scale"))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 3
    # An autoscaler uses the selector to count pods: it selects exactly the engine's pods.
    assert len(plane.api.objects("v1/pods", namespace, scale["status"]["selector"])) == 3


def test_kubectl_warns_of_a_change_that_discards_cached_kv_before_it_happens(plane, operator, shared):
    """A dry run shows the warning, too. Other changes, `kubectl scale` and the operator cause none."""
    flags = ("--namespace", shared, "--warnings-as-errors", "--dry-run=server")

    def patch(spec: Object, *more: str) -> list[str]:
        change = f"--patch={json.dumps({'spec': spec})}"
        return ["patch", f"lmcluster/{NAME}", "--type=merge", change, *flags, *more]

    options = {
        "block-size": "32",
        "dtype": "half",
        "kv-cache-dtype": "fp8",
        "page-size": "64",
        "quantization": "awq",
    }
    engine = {
        "args": ["--dtype=float", *(f"--{option}={value}" for option, value in options.items())],
        "gpu": {"count": 4},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "prefill": {"args": ["--kv_cache_dtype", "fp8"]},
    }
    rest = {"router": {}, "tiers": {"peers": {}}}
    spec = {"engine": engine, "model": {"revision": "v2"}, "sidecar": {"chunkTokens": 512}, **rest}
    changes = [
        "model.revision changes from unset to v2",
        "engine.parallelism.tensor changes from 1 to 2",
        "engine.parallelism.pipeline changes from 1 to 2",
        "sidecar.chunkTokens changes from 256 to 512",
        *(f"engine.args --{option} changes from unset to {value}" for option, value in options.items()),
        "engine.prefill.args --kv-cache-dtype changes from unset to fp8",
    ]
    (warning, _) = helm_error(plane.kubectl, *patch(spec)).splitlines()
    policy = f"'discarded-kv.{RELEASE}-lmcache-operator.{SYSTEM_NAMESPACE}'"
    assert warning == (
        f"Warning: Validation failed for ValidatingAdmissionPolicy {policy} with binding {policy}: "
        f"{', '.join(f'spec.{change}' for change in changes)}, so engines do not find the rows that are "
        "cached so far. They find them again if you undo the change"
    )
    over_pods = {"engine": {"gpu": {"count": 1}, "nodes": 2, "parallelism": {"tensor": 2}}}
    assert "spec.engine.nodes changes from unset to 2, " in helm_error(plane.kubectl, *patch(over_pods))
    plane.kubectl(*patch(spec, f"--as={operator.user}"))
    plane.kubectl(*patch({"engine": {"image": "other:1", "args": ["--max-num-seqs=8"], "replicas": 3}}))
    ranks = {"gpu": {"count": 2}, "parallelism": {"data": 2, "expert": True}}
    plane.kubectl(*patch({"engine": ranks}))
    plane.kubectl("scale", f"lmcluster/{NAME}", "--replicas=3", *flags[:-1])
    plane.kubectl("scale", f"lmcluster/{NAME}", "--replicas=2", *flags[:-1])


def test_new_image_replaces_every_pod_by_eviction(plane, operator, namespace):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    before, mark = set(pods(plane, namespace)), plane.mark()
    ready = condition(plane, namespace, "Ready")
    spec = {"engine": {"image": "vllm/vllm-openai:v0.31.0"}, "sidecar": {"chunkTokens": 512}}
    plane.api.patch(CLUSTERS, NAME, {"spec": spec}, namespace)
    wait = ("--namespace", namespace, "--for=condition=Progressing=False", "--timeout=300s")
    plane.kubectl("wait", f"lmcluster/{NAME}", *wait)
    assert not before & set(pods(plane, namespace))
    wait_ready(plane, namespace)
    events = [each["message"] for each in plane.api.objects("v1/events", namespace)]
    assert any(
        "rows with the former sidecar.chunkTokens 256 are not found any more" in each for each in events
    )
    stayed = condition(plane, namespace, "Ready")["lastTransitionTime"] == ready["lastTransitionTime"]
    assert stayed, "one of two pods served all the time"
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(plane, namespace).values()}
    assert images == {"vllm/vllm-openai:v0.31.0"}
    assert len([w for w in written(plane, operator, mark, namespace) if w.resource == "pods/eviction"]) >= 2
    assert not [w for w in written(plane, operator, mark, namespace) if w.resource == "pods"]


@pytest.mark.parametrize("is_running", [True, False], ids=["operator-running", "operator-down"])
def test_deleting_a_cluster_deletes_all_children(plane, operator, namespace, is_running):
    plane.api.create(CLUSTERS, example(), namespace)
    wait_ready(plane, namespace)
    if not is_running:
        operator.kill()
    plane.kubectl("delete", "--namespace", namespace, f"lmcluster/{NAME}", "--timeout=300s")
    selector = f"lmcache.io/cluster={NAME}"
    kinds = {kind for kind, _ in CHILDREN} | {"v1/pods"}
    plane.wait(lambda: not any(plane.api.objects(kind, namespace, selector) for kind in kinds))


def test_operator_survives_a_restart_of_the_api_server(plane, operator, shared):
    plane.kill("kube-apiserver")
    plane.restart("kube-apiserver")
    plane.api.delete("v1/configmaps", f"{NAME}-sidecar", shared)
    plane.wait(lambda: plane.api.find("v1/configmaps", f"{NAME}-sidecar", shared))
    wait_ready(plane, shared)
    operator.forgive()


def test_operator_writes_nothing_to_an_idle_cluster(plane, operator, idle):
    """This test runs last: the cluster was idle while the others ran and restarted both servers."""
    namespace, mark = idle
    for _ in range(NUM_RESYNCS):
        reconcile_once_more(plane, operator, namespace)
    assert written(plane, operator, mark, namespace) == []
