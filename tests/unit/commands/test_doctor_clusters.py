"""``doctor``: checks of one cluster, its namespace's limits, engines, sidecars and Redis."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks.admission import num_missing, pod_of
from lmcache_cli.commands.doctor.checks.rights import OPERATOR_RIGHTS
from lmcache_cli.commands.doctor.facts import PodTrial
from lmcache_cli.commands.doctor.results import Level
from lmcache_cli.commands.gather import PodFigures
from tests.harness.commands.command_world import NOW, condition, pod
from tests.harness.commands.doctor_world import (
    FORBIDDEN,
    check_one,
    cluster_facts,
    deployment,
    engine,
    figures,
    found_problems,
    listing,
    remote,
    result_of,
)

FAILURE, WARNING, UNKNOWN = Level.FAILURE, Level.WARNING, Level.UNKNOWN
AUTO = {"autoscaling": {"mode": "Auto", "memory": {"maxSize": "8Gi"}}}
CLAIM = {"engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}}}
CLASS = ApiAnswer(200, {})
ADMITTED = ApiAnswer(200)
DEMO = {
    "metadata": {"labels": {"lmcache.io/inject": "demo"}, "name": "own-0", "namespace": "team", "uid": "u"}
}


def kubernetes(version: str) -> ApiAnswer:
    return ApiAnswer(200, {"gitVersion": version})


def node(kubelet: str) -> dict[str, ApiAnswer]:
    return {"node-0": ApiAnswer(200, {"status": {"nodeInfo": {"kubeletVersion": kubelet}}})}


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
    check_one(late, "reconciled", WARNING, "Your last change is not applied yet.")
    late.resource["status"]["lastHeartbeatTime"] = datetime.fromtimestamp(NOW - 600, UTC).isoformat()
    check_one(late, "reconciled", FAILURE, "the conditions are 10 minutes old, and your last change is not")
    silent = cluster_facts()
    del silent.resource["status"]
    silent.resource["metadata"]["creationTimestamp"] = "2025-01-01T00:00:00Z"
    check_one(silent, "reconciled", FAILURE, "No operator works on demo: it has no status")
    check_one(cluster_facts(engine={"args": ["--port=1"]}), "spec", FAILURE, "--port can't be set")


@pytest.mark.parametrize(
    ("spec", "fields", "changes", "check", "level", "text"),
    [
        (CLAIM, {"device_class": CLASS}, {"version": kubernetes("v1.33.1")}, "gpuClaims", FAILURE, "1.34"),
        (CLAIM, {"device_class": CLASS}, {"groups": ApiAnswer(200, {"groups": []})}, "gpuClaims", FAILURE,
         "does not serve resource.k8s.io"),
        (CLAIM, {"device_class": ApiAnswer(404)}, {}, "gpuClaims", FAILURE, "no DeviceClass gpu.nvidia.com"),
        (CLAIM, {"device_class": FORBIDDEN}, {}, "gpuClaims", UNKNOWN, "list things"),
        (AUTO, {}, {"version": kubernetes("v1.34.0")}, "resizes", WARNING, "needs Kubernetes 1.35"),
        (AUTO, {}, {"core": ApiAnswer(200, {"resources": []})}, "resizes", FAILURE, "pods/resize"),
        (AUTO, {"nodes": node("v1.34.4")}, {}, "resizes", WARNING, "node-0 has v1.34.4"),
        (AUTO, {"nodes": {"n": FORBIDDEN}}, {}, "resizes", UNKNOWN, "list things"),
        (AUTO | CLAIM, {"device_class": CLASS}, {}, "resizes", WARNING, "with GPU claims"),
    ],
)  # fmt: skip
def test_feature_that_kubernetes_lacks_is_found(spec, fields, changes, check, level, text):
    check_one(cluster_facts(**spec, **fields), check, level, text, **changes)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (CLAIM, {"device_class": CLASS}),
        (AUTO, {"nodes": node("v1.35.0")}),
    ],
)
def test_feature_that_kubernetes_has_is_no_problem(spec, fields):
    assert found_problems(cluster_facts(**spec, **fields)) == []


QUOTA = (
    'pods "demo-engine-dry-run" is forbidden: exceeded quota: small, requested: requests.memory=2Gi, '
    "used: requests.memory=512Mi, limited: requests.memory=1Gi"
)


def test_command_raises_a_full_quota_for_the_missing_pods_of_all_components():
    trials = [PodTrial("engine", ADMITTED, QUOTA, num_missing=2), PodTrial("remote", ADMITTED, QUOTA)]
    result = result_of("podAdmission", cluster_facts(trials=trials))
    assert "refuses pods of component engine and remote" in result.statement
    patch = json.dumps({"spec": {"hard": {"requests.memory": str((512 << 20) + 3 * (2 << 30))}}})
    assert result.command == f"kubectl -n team patch resourcequota small --type=merge -p '{patch}'"


def unready(number: int = 0, seconds: float = 16.0, **status: Any) -> PodFigures:
    """Return a pod that is not ready since some seconds."""
    live = pod(number, is_ready=False, phase="Pending")
    live["status"]["conditions"][0]["lastTransitionTime"] = datetime.fromtimestamp(
        NOW - seconds, UTC
    ).isoformat()
    live["status"] |= status
    return PodFigures(live, problem="the pod is Pending")


UNPLACED = {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no node"}]}
NO_ENGINE = [
    condition("Ready", "False", "NoEngineReady"),
    condition("EngineAvailable", "False", "NoEngineReady"),
]
NOT_BOUND = [
    condition("Degraded", "True", "FailedBinding", "pod demo-engine-0, claim m: no storage class"),
    *NO_ENGINE,
]
NOT_MOUNTED = [
    condition("Degraded", "True", "FailedMount", "pod demo-engine-0: Secret kv does not exist"),
    *NO_ENGINE,
]
REFUSED = [condition("Degraded", "True", "Unschedulable", "no node has 1 GPU"), *NO_ENGINE]


@pytest.mark.parametrize(
    ("pods", "conditions", "check", "level", "text"),
    [
        ([unready()], NO_ENGINE, "pods", WARNING,
         "Starting since 16s, which may take up to 6m. This concerns 1 pod: demo-engine-0."),
        ([unready(seconds=331)], NO_ENGINE, "pods", FAILURE, "has not become ready in 5 minutes"),
        ([unready(**UNPLACED)], REFUSED, "condition:Degraded", FAILURE, "no node has 1 GPU"),
        ([unready(**UNPLACED)], NO_ENGINE, "pods", FAILURE, "The pod: no node. This concerns 1 pod"),
        ([unready()], NOT_BOUND, "condition:Degraded", FAILURE, "no storage class"),
        ([unready(), unready(1)], NOT_MOUNTED, "condition:Degraded", FAILURE, "Secret kv does not exist"),
        ([], NO_ENGINE, "condition:EngineAvailable", FAILURE, "NoEngineReady"),
    ],
)  # fmt: skip
def test_pod_that_is_not_ready_has_one_result(pods, conditions, check, level, text):
    cluster = replace(cluster_facts(conditions=conditions), pods=pods, engines=[])
    check_one(cluster, check, level, text)


def test_size_that_needs_new_pods_is_a_warning():
    pending = condition("Progressing", "False", "ResizePending", "900Gi needs new pods")
    check_one(cluster_facts(conditions=[pending]), "condition:Progressing", WARNING, "900Gi needs new pods")


def test_condition_that_repeats_a_check_is_left_out():
    unreachable = condition("RemoteTierReachable", "False", "RemoteTierUnreachable")
    cluster = cluster_facts(figures(remote=remote(is_reachable=False)), conditions=[unreachable])
    check_one(cluster, "remoteReachable", FAILURE, "cannot reach the remote tier")
    check_one(cluster_facts(conditions=[unreachable]), "condition:RemoteTierReachable", FAILURE, "a message")


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"operators": listing()}, "operator"),
        ({"operators": listing(deployment(args=("--namespace=a",)))}, "watchedNamespace"),
        ({"operator_rights": dict.fromkeys(OPERATOR_RIGHTS, False)}, "operatorRights"),
    ],
)
def test_cluster_is_not_blamed_for_an_operator_that_cannot_work(changes, check):
    stale = cluster_facts(conditions=REFUSED)
    stale.resource["metadata"]["generation"] = 2
    check_one(stale, check, FAILURE, "", **changes)


@pytest.mark.parametrize(
    ("trial", "level", "text"),
    [
        (PodTrial("engine", ADMITTED, QUOTA), FAILURE, f"refuses pods of component engine: {QUOTA}."),
        (PodTrial("engine", ADMITTED, "no such class", num_missing=0), WARNING, "The present pods run."),
        (PodTrial("remote", ADMITTED, warnings=["hostPath"]), WARNING, "remote, and warns: hostPath."),
        (PodTrial("engine", FORBIDDEN), UNKNOWN, "list things"),
    ],
)
def test_answer_to_a_dry_run_of_a_pod_is_reported(trial, level, text):
    check_one(cluster_facts(trials=[trial]), "podAdmission", level, text)


def test_quota_that_the_present_pods_use_up_is_no_problem():
    trial = PodTrial("engine", ADMITTED, QUOTA, num_missing=0)
    assert found_problems(cluster_facts(trials=[trial])) == []


@pytest.mark.parametrize(("replicas", "created", "expected"), [(2, 1, 1), (2, 2, 0), (0, None, 0)])
def test_missing_pods_are_those_that_the_controller_has_not_created(replicas, created, expected):
    status = {} if created is None else {"replicas": created}
    assert num_missing({"spec": {"replicas": replicas}, "status": status}) == expected


def test_pod_of_a_dry_run_is_that_of_the_template():
    (rendered,) = cluster_facts().stateful_sets.values()
    tried = pod_of(rendered)
    template = rendered["spec"]["template"]
    assert tried["metadata"]["labels"] == template["metadata"]["labels"]
    assert tried["spec"]["containers"] == template["spec"]["containers"]
    assert "serviceAccountName" not in tried["spec"], "the account does not exist yet"
    rendered["metadata"]["uid"] = "u"
    assert pod_of(rendered)["spec"]["serviceAccountName"] == template["spec"]["serviceAccountName"]


def test_pod_without_its_cache_is_found_and_an_injected_one_needs_its_profile():
    check_one(cluster_facts(user_pod()), "injection", WARNING, "no policy processed it")
    refused = user_pod("refused: spec.hostNetwork: no")
    check_one(cluster_facts(refused), "injection", WARNING, "refused: spec.hostNetwork: no.")
    cluster = cluster_facts(user_pod("injected", has_sidecar=True))
    assert found_problems(cluster) == []
    check_one(cluster, "injection", FAILURE, "LMCacheProfile demo-injection is missing", profiles=listing())
