"""``doctor``: checks of the installation and of the namespace."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.checks.rights import FORWARD, OPERATOR_RIGHTS, PROXY, USER_RIGHTS
from lmcache_cli.commands.doctor.command import exit_status, lines
from lmcache_cli.commands.doctor.facts import Right
from lmcache_cli.commands.doctor.results import Level, of_pods, warning
from lmcache_cli.commands.printing import Style
from lmcache_operator import DOCS
from lmcache_operator.api import GROUP, PLURAL
from tests.harness.commands.command_world import NOW
from tests.harness.commands.doctor_world import (
    FORBIDDEN,
    cluster_facts,
    definition,
    deployment,
    facts,
    figures,
    found_problems,
    listing,
    problems,
)

FAILURE, WARNING, UNKNOWN = Level.FAILURE, Level.WARNING, Level.UNKNOWN
MISSING = ApiAnswer(404)
NO_SIDECARS = dict.fromkeys(USER_RIGHTS, True) | {PROXY: False, FORWARD: False}
NO_SECRETS = dict.fromkeys(OPERATOR_RIGHTS, True) | {Right("create", "", "secrets"): False}
CRD = f"{PLURAL}.{GROUP}"
INJECTED = {
    "metadata": {"name": "pod-0", "labels": {"lmcache.io/inject": "demo"}},
    "spec": {"initContainers": [{"name": "lmcache-sidecar"}], "containers": [{"name": "c"}]},
}
UNCACHED = INJECTED | {"spec": {"containers": [{"name": "c"}]}}
NO_CACHE = listing(UNCACHED)
NO_DEFINITIONS = dict.fromkeys(facts().definitions, MISSING)
UNPULLED = {
    "metadata": {"name": "operator-0", "namespace": "lmcache-system", "uid": "u"},
    "spec": {},
    "status": {
        "containerStatuses": [
            {"name": "c", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
        ]
    },
}
STRANGER = UNCACHED | {"metadata": {"name": "pod-1", "labels": {"lmcache.io/inject": "nobody"}}}


def old_definition() -> ApiAnswer:
    """Return the CRD of an earlier version."""
    metadata = {"name": CRD, "labels": {"app.kubernetes.io/version": "0.0.9"}}
    return ApiAnswer(200, definition() | {"metadata": metadata})


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"),
    [
        ({"version": ApiAnswer(200, {"gitVersion": "v1.32.9"})}, "kubernetesVersion", FAILURE,
         "not supported"),
        ({"version": ApiAnswer(200, {"gitVersion": "moon"})}, "kubernetesVersion", WARNING, "'moon'"),
        ({"version": ApiAnswer()}, "kubernetesVersion", UNKNOWN, "did not answer in time"),
        ({"operators": listing()}, "operator", FAILURE, "No operator is installed"),
        ({"operators": FORBIDDEN}, "operator", UNKNOWN, 'lacks the right "list things"'),
        ({"operators": listing(deployment(ready=0))}, "operator", FAILURE, "0 of 2 pods"),
        ({"operators": listing(deployment(ready=1))}, "operator", WARNING, "1 of 2 pods"),
        ({"operators": listing(deployment(ready=0, seconds=16))}, "operator", WARNING,
         "are ready. Starting since 16s, which may take up to 10m."),
        ({"operators": listing(deployment(ready=0, seconds=16)), "operator_pods": listing(UNPULLED)},
         "operator", FAILURE, "are ready. First: pod operator-0, container c: no such image."),
        ({"operators": listing(deployment(replicas=0, ready=0))}, "operator", FAILURE, "scaled to 0 pods"),
        ({"namespace_object": MISSING, "clusters": ()}, "namespace", FAILURE, "There is no namespace team"),
        ({"operators": listing(deployment("a"), deployment("b"))}, "operator", WARNING, "2 operators"),
        ({"operators": listing(deployment(version="0.9.0"))}, "versions", WARNING, "lmcache has 0.9.0"),
        ({"definitions": {CRD: old_definition()}}, "versions", WARNING, "and the CRD has 0.0.9"),
        ({"operators": listing(), "listed_clusters": MISSING, "clusters": ()}, "installed", FAILURE,
         "is not installed"),
        ({"operators": listing(deployment(args=("--namespace=a",)))}, "watchedNamespace", FAILURE,
         "does not watch namespace team"),
        ({"listed_clusters": MISSING, "clusters": (), "definitions": NO_DEFINITIONS}, "crd", FAILURE,
         "lacks the CRD lmcacheclusters.lmcache.io and the CRD lmcacheprofiles.lmcache.io."),
        ({"listed_clusters": FORBIDDEN, "clusters": ()}, "clusters", UNKNOWN, "list things"),
        ({"listed_clusters": listing(), "clusters": ()}, "clusters", WARNING, "has no LMCacheCluster"),
        ({"user_rights": NO_SIDECARS}, "userRights", WARNING,
         'lacks the right "get pods/proxy", which reads sidecars. It also lacks: create pods/portforward'),
        ({"user_rights": dict.fromkeys(USER_RIGHTS)}, "userRights", UNKNOWN, "did not answer in time"),
        ({"operator_rights": NO_SECRETS}, "operatorRights", FAILURE, "create secrets"),
        ({"operator_rights": {}, "operator_rights_problem": FORBIDDEN}, "operatorRights", UNKNOWN, "things"),
        ({"injected_pods": NO_CACHE, "policies": MISSING}, "injectionPolicy", FAILURE, "have no effect"),
        ({"injected_pods": NO_CACHE, "policies": listing()}, "injectionPolicy", FAILURE, "is missing"),
        ({"injected_pods": NO_CACHE, "bindings": listing()}, "injectionPolicy", FAILURE, "is missing"),
        ({"injected_pods": NO_CACHE, "bindings": FORBIDDEN}, "injectionPolicy", UNKNOWN, "list things"),
        ({"injected_pods": FORBIDDEN}, "injectionPolicy", UNKNOWN, "list things"),
        ({"injected_pods": listing(STRANGER, UNCACHED)}, "injectionNames", FAILURE,
         "nobody that does not exist"),
    ],
)  # fmt: skip
def test_fault_is_found_and_nothing_else(changes, check, level, text):
    ((found_check, found_level, statement),) = found_problems(**changes)
    assert (found_check, found_level) == (check, level)
    assert text in statement


@pytest.mark.parametrize(
    ("answer", "check", "level", "text"),
    [
        (MISSING, "crd", FAILURE, "lacks the CRD lmcacheclusters.lmcache.io."),
        (FORBIDDEN, "crd:lmcacheclusters", UNKNOWN, "list things"),
        (
            ApiAnswer(200, definition() | {"status": {}}),
            "crd:lmcacheclusters",
            FAILURE,
            "does not serve the CRD",
        ),
    ],
)
def test_missing_definition_is_found(answer, check, level, text):
    definitions = facts().definitions | {CRD: answer}
    ((found_check, found_level, statement),) = found_problems(definitions=definitions)
    assert (found_check, found_level) == (check, level)
    assert text in statement


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"injected_pods": listing(INJECTED), "policies": MISSING}, id="injected from a file"),
        pytest.param({"user_rights": dict.fromkeys(USER_RIGHTS, True) | {FORWARD: False}}, id="one right"),
        pytest.param({"injected_pods": listing(STRANGER), "has_one_cluster": True}, id="unread cluster"),
    ],
)
def test_change_that_does_no_harm_is_no_problem(changes):
    assert found_problems(**changes) == []


@pytest.mark.parametrize(("pods_time", "offset", "text"), [(NOW - 7, -7.0, "7 s"), (NOW + 60, 60.0, "60 s")])
def test_wrong_clock_of_the_user_does_not_blame_the_pods(pods_time, offset, text):
    right = facts(cluster_facts(figures(time=pods_time)), api_offset_seconds=offset)
    ((check, level, statement),) = problems(run_checks(right))
    assert (check, level) == ("clocks", WARNING)
    assert f"differ by {text}" in statement


@pytest.mark.parametrize(
    "text", ["x; reboot", "$(reboot)", "x\nreboot", "\x1b[2J", "--post-renderer=x", "a},b={c"]
)
def test_deployment_of_a_tenant_cannot_write_a_command(text):
    release = {"meta.helm.sh/release-name": text, "meta.helm.sh/release-namespace": text}
    fake = deployment(args=(f"--namespace={text}", "--namespace=b"))
    fake["metadata"]["annotations"] = release
    result = next(each for each in run_checks(facts(operators=listing(fake))) if each.command)
    assert result.command == (
        "helm upgrade lmcache charts/lmcache-operator -n lmcache-system"
        " --reset-then-reuse-values --set 'watchNamespaces={b,team}'"
    )


def test_pod_replaces_only_the_word_that_stands_for_it():
    result = warning("", "", command="kubectl --context=MYPOD -n team logs POD -c engine")
    assert of_pods(result, ["a"], 1).command == "kubectl --context=MYPOD -n team logs a -c engine"


def test_address_in_a_remedy_stays_whole():
    absent = facts(operators=listing(), listed_clusters=MISSING, clusters=())
    shown = list(lines(absent, run_checks(absent), Style(False), 60))
    assert f"{DOCS}/get-started/cluster.md" in "\n".join(shown).split()


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("no answer within 3 s", "kubectl lmcache doctor --context=prod -n team --timeout 120"),
        ("HTTP 429: too many requests", "kubectl lmcache doctor --context=prod -n team --timeout 120"),
        ("HTTP 500: etcd failed", "kubectl --context=prod get --raw '/readyz?verbose'"),
    ],
)
def test_api_server_without_answers_is_one_failure_that_names_them(reason, command):
    late = facts(version=ApiAnswer(), operators=ApiAnswer(), unanswered={"/version": reason, "/x": "late"})
    chosen = replace(late, context="prod", options=" --context=prod")
    (failure,) = [each for each in run_checks(chosen) if each.level is not Level.OK]
    assert (failure.check, failure.level, failure.command) == ("apiServer", FAILURE, command)
    assert failure.statement == (
        "The API server of the Kubernetes cluster of context prod does not answer /version, and 1 more: "
        f"{reason}. Not checked: kubernetesVersion, operator."
    )


def test_exit_status_distinguishes_failures_and_unreadable_clusters():
    warned = facts(operators=listing(deployment(ready=1)))
    assert exit_status(warned, run_checks(warned), is_strict=False) == 0
    assert exit_status(warned, run_checks(warned), is_strict=True) == 1
    failed = facts(operators=listing())
    assert exit_status(failed, run_checks(failed), is_strict=False) == 1
    unread = replace(failed, listed_clusters=FORBIDDEN, clusters=())
    assert exit_status(unread, run_checks(unread), is_strict=False) == 2


def test_failures_stand_first():
    offset = cluster_facts(figures(time=NOW + 9))
    results = run_checks(facts(offset, operators=listing(), version=FORBIDDEN))
    levels = [result.level for result in results]
    assert (levels[:3], set(levels[3:])) == ([FAILURE, WARNING, UNKNOWN], {Level.OK})


def test_rights_of_the_operator_are_those_of_the_chart():
    chart = Path(__file__).resolve().parents[3] / "charts" / "lmcache-operator" / "templates"
    _, _, text = (chart / "_helpers.tpl").read_text().partition('define "lmcache-operator.rules" -}}')
    granted = {
        Right(verb, group, resource)
        for rule in yaml.safe_load(text.partition("{{- end }}")[0])
        if "resourceNames" not in rule  # a review without a name would be refused
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(OPERATOR_RIGHTS) == granted
