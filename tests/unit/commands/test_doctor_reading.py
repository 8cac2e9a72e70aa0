"""``doctor``: reading with faults of the API server, and printing."""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import yaml

from lmcache_cli.commands import printing
from lmcache_cli.commands.connection import ApiConnection
from lmcache_cli.commands.doctor import command
from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.reading import read_engine, read_facts
from lmcache_cli.commands.doctor.results import Level, Result
from lmcache_operator import DOCS
from lmcache_operator.contract.conditions import runbook
from lmcache_operator.errors import NoAnswerError, NotFoundError, UnavailableError
from lmcache_operator.kube.pod_http import PodAnswer
from testing.child_process import REPOSITORY
from tests.harness.commands.command_world import pod, stats
from tests.harness.commands.doctor_world import deployment, engine, facts, listing, sglang
from tests.harness.jumping_loop import now, run
from tests.harness.operator.model import cluster

ROOT = "/apis/lmcache.io/v1alpha1/namespaces/team/lmcacheclusters"
PODS = "/api/v1/namespaces/team/pods"
SETS = "/apis/apps/v1/namespaces/team/statefulsets"
POSTS = {"reviews": "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "pods": PODS}
NO_KIND = (404, b"404 page not found\n")


class ApiStandIn:
    """An API server with pages by the beginning of their path. All other reads are refused, or hang."""

    def __init__(self, pages: Mapping[str, Any], answers: Mapping[str, Any], *, hangs: bool = False) -> None:
        self.pages, self.answers, self.hangs = pages, answers, hangs

    async def read(self, path: str, *, seconds: float, max_bytes: int) -> tuple[int, bytes]:
        for beginning, page in self.pages.items():
            if path.startswith(beginning):
                return page if isinstance(page, tuple) else (200, json.dumps(page).encode())
        if self.hangs:
            await asyncio.sleep(seconds)
            return 0, b"no answer: timeout"
        return 403, b'{"kind":"Status","message":"no"}'

    async def date(self, *, seconds: float) -> str:
        await asyncio.sleep(seconds if self.hangs else 0)
        return "Thu, 01 Jan 2026 00:00:00 GMT"

    async def ask(self, path: str, body: Any, *, seconds: float) -> tuple[int, bytes, list[str]]:
        for beginning, (status, answer) in self.answers.items():
            if path.startswith(beginning):
                return status, json.dumps(answer).encode(), ["slow"]
        await asyncio.sleep(seconds if self.hangs else 0)
        if self.hangs:
            return 0, b"no answer: timeout", []
        if "/subjectaccessreviews" in path:
            return 403, b'{"kind":"Status","message":"no"}', []
        return 201, b'{"status": {"allowed": true}}', []

    @asynccontextmanager
    async def web_socket(self, path: str, protocol: str, *, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        raise aiohttp.ClientConnectionError("hangs")
        yield


def read(
    pages: Mapping[str, Any], name: str | None = None, *, hangs: bool = False, **answers: tuple[int, Any]
) -> Facts:
    """Read the facts of namespace ``team``, in at most 4 s of the loop's time.

    ``answers``: those to ``reviews`` of the user's rights, and to dry runs of ``pods``.
    """
    by_path = {POSTS[name]: answer for name, answer in answers.items()}

    async def timed() -> Facts:
        connection = ApiConnection(ApiStandIn(pages, by_path, hangs=hangs), "team")
        collected = await read_facts(connection, name, "")
        assert now() <= 4.0
        return collected

    return run(timed())


def labelled(number: int, **labels: str) -> dict[str, Any]:
    item = pod(number, containers=[engine()])
    item["metadata"]["labels"] = {f"lmcache.io/{name}": value for name, value in labels.items()}
    return item


def test_reads_that_hang_end_in_time_and_become_unknown():
    pods = [labelled(number, cluster="demo", component="engine") for number in range(1000)]
    lists = {f"{PODS}?labelSelector=lmcache.io/cluster": {"items": pods}, f"{PODS}?": {"items": []}}
    collected = read({ROOT: listing(cluster()).body, **lists}, hangs=True)
    assert len(collected.clusters[0].pods) == 1000
    results = run_checks(collected)
    unknown = {result.check for result in results if result.level is Level.UNKNOWN}
    assert unknown == {"sidecars", "engineVersion"}
    (failure,) = [result for result in results if result.check == "apiServer"]
    assert failure.level is Level.FAILURE
    assert "this Kubernetes cluster does not answer /" in failure.statement
    assert re.search("Not checked: kubernetesVersion, .*, operator, .*, podAdmission", failure.statement)
    sidecars = [result for result in results if result.check == "sidecars"]
    assert {result.level for result in sidecars} == {Level.WARNING, Level.UNKNOWN}
    assert "64 of 1000 pods: demo-engine-0, and 63 more." in sidecars[0].statement
    assert "936 of 1000 sidecars: no answer before the time" in sidecars[1].statement


def test_api_server_that_hangs_is_an_error():
    with pytest.raises(NoAnswerError, match="no answer: timeout"):
        read({}, hangs=True)


def test_refused_reads_name_the_missing_rights():
    results = run_checks(read({ROOT: listing(cluster()).body}))
    missing = {result.check: result.missing_right for result in results if result.missing_right}
    assert (missing["operator"], missing["sidecars"]) == ("list deployments.apps", "list pods")


@pytest.mark.parametrize(
    ("answers", "level", "text"),
    [
        ({"pods": (201, {})}, Level.WARNING, "admits pods of component engine, and warns: slow."),
        ({"pods": (403, {"message": "exceeded quota: q"})}, Level.FAILURE, "engine: exceeded quota: q."),
        ({"pods": (503, {"message": "try later"})}, Level.UNKNOWN, "try later"),
        (
            {"pods": (400, {"message": "x does not support dry run"})},
            Level.UNKNOWN,
            "does not support dry run",
        ),
        ({"reviews": (201, {"status": {"allowed": False}})}, Level.UNKNOWN, 'the right "create pods"'),
    ],
)
def test_api_server_is_asked_whether_it_admits_a_pod(answers, level, text):
    results = run_checks(read({ROOT: listing(cluster()).body, SETS: listing().body}, **answers))
    (result,) = [result for result in results if result.check == "podAdmission"]
    assert result.level is level
    assert text in result.statement


def test_existing_stateful_set_shows_whether_pods_are_missing():
    (rendered,) = ClusterFacts(cluster()).stateful_sets.values()
    live = rendered | {"status": {"replicas": rendered["spec"]["replicas"]}}
    pages = {ROOT: listing(cluster()).body, SETS: listing(live).body}
    (of_demo,) = read(pages, pods=(403, {"message": "exceeded quota: q"})).clusters
    assert [(trial.component, trial.num_missing) for trial in of_demo.trials] == [("engine", 0)]
    incomplete = live | {"status": {"replicas": 0}}
    pages[SETS] = listing(incomplete, live).body  # of an engine over several nodes, and of a complete one
    (of_demo,) = read(pages, pods=(403, {"message": "exceeded quota: q"})).clusters
    assert [(trial.component, trial.num_missing) for trial in of_demo.trials] == [("engine", 1)]


def test_refusal_by_a_quota_is_unknown_if_stateful_sets_cannot_be_listed():
    results = run_checks(read({ROOT: listing(cluster()).body}, pods=(403, {"message": "exceeded quota: q"})))
    (result,) = [result for result in results if result.check == "podAdmission"]
    assert (result.level, result.missing_right) == (Level.UNKNOWN, "list statefulsets.apps")


def test_rights_of_the_operator_need_a_right_of_their_own():
    pages = {ROOT: listing(cluster()).body, "/apis/apps/v1/deployments": listing(deployment()).body}
    results = run_checks(read(pages))
    (result,) = [result for result in results if result.check == "operatorRights"]
    assert result.missing_right == "create subjectaccessreviews.authorization.k8s.io"


def test_operator_is_found_in_its_usual_namespace():
    within = "/apis/apps/v1/namespaces/lmcache-system/deployments"
    collected = read({ROOT: listing(cluster()).body, within: listing(deployment()).body})
    assert [each["metadata"]["name"] for each in collected.operators.items] == ["lmcache"]


def test_operator_in_its_usual_namespace_comes_before_a_deployment_of_a_tenant():
    fake = deployment("fake")
    fake["metadata"]["namespace"] = "a-tenant"
    deployments = listing(fake, deployment()).body
    collected = read({ROOT: listing(cluster()).body, "/apis/apps/v1/deployments": deployments})
    assert [each["metadata"]["name"] for each in collected.operators.items] == ["lmcache", "fake"]


def test_missing_kind_differs_from_a_missing_cluster():
    assert read({ROOT: NO_KIND}).listed_clusters.is_missing
    assert read({ROOT: NO_KIND}, "demo").listed_clusters.is_missing
    with pytest.raises(NotFoundError, match="no LMCacheCluster demo"):
        read({ROOT: (404, b'{"kind": "Status", "reason": "NotFound"}')}, "demo")
    with pytest.raises(UnavailableError, match="like a Kubernetes API server"):
        read({ROOT: {"kind": "Status"}}, "demo")


def test_pods_belong_to_their_clusters():
    places = (("demo", "engine"), ("other", "engine"), ("demo", "remote"))
    pods = [labelled(n, cluster=name, component=part) for n, (name, part) in enumerate(places)]
    page = f"{PODS}?labelSelector="
    pages = {
        f"{ROOT}/demo": cluster(),
        f"{page}lmcache.io/cluster%3Ddemo": {"items": pods},
        f"{page}lmcache.io/inject%3Ddemo": {"items": [labelled(3, inject="demo")]},
        f"{PODS}/": stats(),
    }
    (facts_of_demo,) = read(pages, "demo").clusters
    assert [each.name for each in facts_of_demo.pods] == ["demo-engine-0", "demo-engine-3"]
    assert [each["metadata"]["name"] for each in facts_of_demo.shard_pods] == ["demo-engine-2"]
    assert facts_of_demo.pods[0].stats["is_ready"] is True


def test_engines_report_version_and_cache_settings():
    metrics = 'vllm:cache_config_info{block_size="16",engine="0",quoted="a\\"b"} 1.0\n'
    answers = {"/version": b'{"version": "0.32.0"}', "/metrics": metrics.encode()}

    async def get(*place: Any) -> PodAnswer:
        return PodAnswer(200, answers[place[3]])

    tls = pod(1, containers=[engine("--ssl-certfile=/tls.crt")])
    first, second = (run(read_engine(get, each)) for each in (pod(), tls))
    cache = {"block_size": "16", "engine": "0", "quoted": 'a\\"b'}
    assert first.stats == {"version": "0.32.0", "cache": cache}
    assert "HTTPS" in second.problem


def test_sglang_reports_version_and_settings_at_its_own_port():
    info = {"version": "0.5.23", "page_size": 64, "disable_radix_cache": False, "api_key": "secret"}
    asked = []

    async def get(*place: Any) -> PodAnswer:
        asked.append(place[2:])
        return PodAnswer(200, json.dumps(info).encode())

    with_port, without_port = pod(0, containers=[sglang("--port=8000")]), pod(1, containers=[sglang()])
    first, second = (run(read_engine(get, each)) for each in (with_port, without_port))
    settings = {"page_size": "64", "disable_radix_cache": "False"}
    assert first.stats == second.stats == {"version": "0.5.23", "cache": settings}
    assert asked == [(8000, "/server_info"), (30000, "/server_info")]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (PodAnswer(0, b"refused"), "refused"),
        (PodAnswer(0, b"no", "get pods/proxy"), "forbidden: get pods/proxy"),
        (PodAnswer(200, b"[" * 99_999), ""),
    ],
)
def test_engine_without_an_answer_is_a_problem(answer, problem):
    async def get(*_: Any) -> PodAnswer:
        return answer

    figures = run(read_engine(get, pod()))
    assert (figures.problem, bool(figures.stats.get("version"))) == (problem, False)


def test_lines_show_remedy_and_runbook_below_each_problem():
    failing = facts(operators=listing(deployment(ready=0)))
    shown = list(command.lines(failing, run_checks(failing), printing.Style(False), 80))
    assert shown[0] == "FAILURE installation operator: 0 of 2 pods of the operator"
    assert shown[1] == "        lmcache-system/lmcache are ready."
    assert shown[2] == "        -> Read its log:"
    command_line, address = shown[3:5]
    logs = "logs -l app.kubernetes.io/component=operator --prefix --tail=100"
    assert command_line == f"{11 * ' '}kubectl -n lmcache-system {logs}"
    assert address == f"{11 * ' '}{DOCS}/runbooks/LMCacheOperatorDown.md"
    assert all(len(line) <= 80 for line in shown if line not in (command_line, address))
    assert shown[-1].endswith("checks in namespace team: 1 failure, 22 ok.")
    colored = list(command.lines(failing, run_checks(failing), printing.Style(True), 80))
    assert colored[0].startswith("\x1b[31mFAILURE\x1b[0m ")


def test_document_is_the_same_in_json_and_yaml():
    results = run_checks(facts())
    document = command.document(facts(), results)
    assert json.loads(printing.document(document, "json")) == document
    assert yaml.safe_load(printing.document(document, "yaml")) == document
    assert (document["version"], document["time"]) == (1, "2026-01-01T00:00:00+00:00")
    assert document["summary"]["ok"] == len(document["checks"])
    assert Result(Level.WARNING, "s", "r", "OOMKilled").document()["runbook"] == (
        "PodDoesNotStart.md#oomkilled"
    )
    keys = {"check", "level", "subject", "statement", "remedy", "command", "runbook", "missingRight"}
    assert {key for each in document["checks"] for key in each} == keys


def test_addresses_of_runbooks_are_those_of_the_repository_and_the_chart():
    (repository,) = re.findall("repo_url: (.*)", (REPOSITORY / "mkdocs.yml").read_text())
    values = yaml.safe_load((REPOSITORY / "charts/lmcache-operator/values.yaml").read_text())
    assert f"{repository}/blob/main/docs" == DOCS
    assert values["monitoring"]["runbookUrl"] == f"{DOCS}/runbooks"


def test_every_runbook_that_a_check_names_exists():
    pages = {path.name for path in (REPOSITORY / "docs" / "runbooks").glob("*.md")}
    checks = REPOSITORY / "operator" / "lmcache_cli" / "commands" / "doctor" / "checks"
    text = "".join(path.read_text() for path in checks.glob("*.py"))
    named = set(re.findall(r'(?:_RUNBOOK = |, )"([A-Z][a-z]+[A-Z]\w+)"(?:, |\)+\n|\n)', text))
    assert "EngineNotAttached" in named
    assert {"FailedCreate", "MemoryNotPinned", "ResizeInfeasible"} <= named
    assert {runbook(name).partition("#")[0] for name in named} <= pages
