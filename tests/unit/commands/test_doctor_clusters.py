"""``doctor``: checks of one cluster, its namespace's limits, engines, sidecars and Redis."""

import pytest
from lmcache_operator.commands.doctor.answers import Answer
from lmcache_operator.commands.doctor.facts import ClusterFacts
from lmcache_operator.commands.doctor.results import Level
from lmcache_operator.commands.gather import PodFigures

from tests.harness.command_world import NOW, condition, pod
from tests.harness.doctor_world import (
    FORBIDDEN,
    check_one,
    cluster_facts,
    engine,
    figures,
    found_problems,
    listing,
    result_of,
)

FAILURE, WARNING, UNKNOWN = Level.FAILURE, Level.WARNING, Level.UNKNOWN
AUTO = {"autoscaling": {"mode": "Auto", "memory": {"maxSize": "8Gi"}}}
CLAIM = {"engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}}}
IMAGES = {"sidecar": {"payload": "ImageVolume"}}
CLASS = Answer(200, {})
RESTRICTED = Answer(200, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
BASELINE = Answer(200, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}})
HOST_PATH = {"model": {"volume": {"hostPath": {"path": "/models"}}}}
DEMO = {
    "metadata": {"labels": {"lmcache.io/inject": "demo"}, "name": "own-0", "namespace": "team", "uid": "u"}
}


def kubernetes(version: str) -> Answer:
    return Answer(200, {"gitVersion": version})


def node(kubelet: str, runtime: str = "containerd://2.1.0") -> dict[str, Answer]:
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    return {"node-0": Answer(200, {"status": {"nodeInfo": info}})}


def quota(used: dict[str, str] | None = None, spec: dict | None = None, **hard: str) -> Answer:
    amounts = {name.replace("_", "."): value for name, value in hard.items()}
    status = {"used": used or {}}
    return listing(
        {"metadata": {"name": "small"}, "spec": {"hard": amounts} | (spec or {}), "status": status}
    )


def operated(count: int, **spec: dict) -> ClusterFacts:
    """Return a cluster with this number of pods of the operator."""
    pods = [figures(number) for number in range(count)]
    for each in pods:
        each.pod["metadata"]["labels"] = {"lmcache.io/component": "engine"}
    return cluster_facts(*pods, **spec)


def limit_range(**fields: dict[str, str]) -> Answer:
    return listing({"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container"} | fields]}})


def user_pod(outcome: str = "", *, has_sidecar: bool = False) -> PodFigures:
    sidecars = [{"name": "lmcache-sidecar"}] if has_sidecar else []
    metadata = DEMO["metadata"] | {"annotations": {"lmcache.io/injection": outcome} if outcome else {}}
    spec = {"initContainers": sidecars, "containers": [engine()]}
    report = figures().stats if has_sidecar else {}
    return PodFigures(
        {"metadata": metadata, "spec": spec, "status": pod()["status"]}, report, answered_at=NOW
    )


@pytest.mark.parametrize(
    ("conditions", "check", "level", "text"),
    [
        ([("Ready", "False", "CrashLoopBackOff")], "condition:Ready", FAILURE, "(CrashLoopBackOff)"),
        ([("SidecarAttached", "Unknown", "NoAnswer")], "condition:SidecarAttached", WARNING, "is Unknown"),
        ([("MemoryTierPinned", "False", "MemoryNotPinned"), ("Degraded", "True", "MemoryNotPinned")],
         "condition:MemoryTierPinned", WARNING, "(MemoryNotPinned)"),
        ([("Degraded", "True", "OOMKilled")], "condition:Degraded", WARNING, "(OOMKilled)"),
    ],
)  # fmt: skip
def test_bad_condition_names_its_runbook(conditions, check, level, text):
    cluster = cluster_facts(conditions=[condition(*each) for each in conditions])
    check_one(cluster, check, level, text)
    assert result_of(check, cluster).runbook == conditions[0][2]


def test_normal_progress_is_no_problem():
    normal = [("Progressing", "True", "Starting"), ("AutoscalingActive", "Unknown", "Counting")]
    assert found_problems(cluster_facts(conditions=[condition(*each) for each in normal])) == []


def test_operator_that_does_not_follow_or_cannot_is_found():
    late = cluster_facts()
    late.resource["metadata"]["generation"] = 2
    check_one(late, "reconciled", WARNING, "generation 1 of the spec, not yet 2")
    silent = cluster_facts()
    del silent.resource["status"]
    check_one(silent, "reconciled", FAILURE, "has reported no status")
    check_one(cluster_facts(engine={"args": ["--port=1"]}), "spec", FAILURE, "--port can't be set")


@pytest.mark.parametrize(
    ("spec", "fields", "changes", "check", "level", "text"),
    [
        (CLAIM, {"device_class": CLASS}, {"version": kubernetes("v1.33.1")}, "gpuClaims", FAILURE, "1.34"),
        (CLAIM, {"device_class": CLASS}, {"groups": Answer(200, {"groups": []})}, "gpuClaims", FAILURE,
         "does not serve resource.k8s.io"),
        (CLAIM, {"device_class": Answer(404)}, {}, "gpuClaims", FAILURE, "no DeviceClass gpu.nvidia.com"),
        (CLAIM, {"device_class": FORBIDDEN}, {}, "gpuClaims", UNKNOWN, "list things"),
        (IMAGES, {}, {"version": kubernetes("v1.34.0")}, "imageVolumes", FAILURE, "needs Kubernetes 1.35"),
        (IMAGES, {"nodes": node("v1.34.4")}, {}, "imageVolumes", FAILURE, "node-0 has v1.34.4"),
        (IMAGES, {"nodes": node("v1.36.0", "containerd://1.7.2")}, {}, "imageVolumes", FAILURE, "1.7.2"),
        (IMAGES, {"nodes": {"n": FORBIDDEN}}, {}, "imageVolumes", UNKNOWN, "list things"),
        (AUTO, {}, {"version": kubernetes("v1.34.0")}, "resizes", WARNING, "needs Kubernetes 1.35"),
        (AUTO, {}, {"core": Answer(200, {"resources": []})}, "resizes", FAILURE, "pods/resize"),
        (AUTO, {"nodes": node("v1.34.4")}, {}, "resizes", WARNING, "node-0 has v1.34.4"),
        (AUTO | CLAIM, {"device_class": CLASS}, {}, "resizes", WARNING, "with GPU claims"),
    ],
)  # fmt: skip
def test_feature_that_kubernetes_lacks_is_found(spec, fields, changes, check, level, text):
    check_one(cluster_facts(**spec, **fields), check, level, text, **changes)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (CLAIM, {"device_class": CLASS}),
        (IMAGES, {"nodes": node("v1.35.0")}),
        (IMAGES, {"nodes": node("v1.35.0", "cri-o://1.30.0")}),
        (AUTO, {"nodes": node("v1.35.0", "containerd://1.7.0")}),
    ],
)
def test_feature_that_kubernetes_has_is_no_problem(spec, fields):
    assert found_problems(cluster_facts(**spec, **fields)) == []


@pytest.mark.parametrize(
    ("level", "spec", "text"),
    [
        (BASELINE, HOST_PATH, "volume models is a hostPath"),
        (RESTRICTED, {"engine": {"podTemplate": {"spec": {"securityContext": {"runAsNonRoot": False}}}}},
         "container sidecar does not set runAsNonRoot"),
        (RESTRICTED, {"model": {"volume": {"nfs": {"server": "s", "path": "/"}}}}, "volume models is a nfs"),
        (BASELINE, {"engine": {"podTemplate": {"spec": {"hostIPC": True}}}}, "hostIPC is true"),
    ],
)  # fmt: skip
def test_pods_that_pod_security_refuses_are_found(level, spec, text):
    check_one(cluster_facts(**spec), "podSecurity", FAILURE, text, namespace_object=level)


@pytest.mark.parametrize("level", [BASELINE, RESTRICTED])
def test_pods_of_the_operator_pass_every_pod_security_level(level):
    managed = {"tiers": {"remote": {"managed": {"memoryPerShard": "1Gi"}}, "disk": {"size": "10Gi"}}}
    assert found_problems(cluster_facts(shard_pods=[pod()], **managed), namespace_object=level) == []
    assert found_problems(cluster_facts(**HOST_PATH)) == []  # no level is enforced


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        (quota(pods="1", used={"pods": "1"}), FAILURE, "has 0 of pods left. 2 missing pods"),
        (
            quota(requests_memory="6Gi", used={"requests.memory": "5Gi"}),
            FAILURE,
            "has 1Gi of requests.memory",
        ),
        (quota(limits_memory="64Gi"), FAILURE, "requires a memory limit of container engine"),
        (FORBIDDEN, UNKNOWN, "list things"),
    ],
)
def test_quota_that_stops_missing_pods_is_found(answer, level, text):
    check_one(operated(1, engine={"replicas": 3}), "resourceQuota", level, text, quotas=answer)


def test_quota_with_free_amounts_or_for_other_pods_is_no_problem():
    three = operated(0, engine={"replicas": 3})
    assert found_problems(three, quotas=quota(pods="3", requests_memory="100Gi")) == []
    assert found_problems(three, quotas=quota(pods="1", spec={"scopes": ["BestEffort"]})) == []
    default = limit_range(default={"memory": "64Gi", "cpu": "8"})
    assert found_problems(three, quotas=quota(limits_memory="640Gi"), limit_ranges=default) == []


def test_quota_that_stops_growth_is_a_warning():
    grown = quota(requests_memory="8Gi", used={"requests.memory": "6Gi"})
    check_one(operated(1, **AUTO), "resourceQuota", WARNING, "Autoscaling may use 7Gi more", quotas=grown)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max": {"memory": "2Gi"}}, "container engine has no memory limit, and the maximum is 2Gi"),
        ({"max": {"memory": "512Mi"}, "default": {"memory": "512Mi"}}, "more than its default limit 512Mi"),
        ({"min": {"cpu": "500m"}}, "requests cpu 0.1, and the minimum is 0.5"),
    ],
)
def test_limit_range_that_refuses_pods_is_found(fields, text):
    results = found_problems(cluster_facts(), limit_ranges=limit_range(**fields))
    assert {result[:2] for result in results} == {("limitRange", FAILURE)}
    assert any(text in statement for _, _, statement in results)


def test_limit_range_with_large_defaults_is_no_problem():
    answer = limit_range(default={"memory": "64Gi", "cpu": "8"}, max={"memory": "64Gi"})
    assert found_problems(cluster_facts(), limit_ranges=answer) == []
    check_one(cluster_facts(), "limitRange", UNKNOWN, "list things", limit_ranges=FORBIDDEN)


def test_pod_without_its_cache_is_found_and_an_injected_one_needs_its_profile():
    check_one(cluster_facts(user_pod()), "injection", WARNING, "no policy processed it")
    refused = user_pod("refused: spec.hostNetwork: no")
    check_one(cluster_facts(refused), "injection", WARNING, "refused: spec.hostNetwork: no.")
    cluster = cluster_facts(user_pod("injected", has_sidecar=True))
    assert found_problems(cluster) == []
    check_one(cluster, "injection", FAILURE, "LMCacheProfile demo-injection is missing", profiles=listing())
