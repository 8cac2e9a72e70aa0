"""Facts of a healthy installation with one cluster, for the tests of ``doctor``."""

import copy
import json
from datetime import UTC, datetime
from typing import Any

import yaml

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.checks.rights import OPERATOR_RIGHTS, USER_RIGHTS
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts, PodTrial
from lmcache_cli.commands.doctor.results import Level, Result
from lmcache_cli.commands.gather import PodFigures
from lmcache_operator.api import GROUP, PLURAL, PROFILE_PLURAL
from testing.kube.operator import CRDS
from tests.harness.commands.command_world import NOW, GiB, condition, pod, stats
from tests.harness.operator.model import cluster

NAMESPACE = "team"
KV_CONFIG = {"kv_connector": "LMCacheClusterConnector", "kv_load_failure_policy": "recompute"}
SERVER = {
    "name": "redis.cache:6379", "problem": "", "policy": "allkeys-lru", "answer_seconds": 0.002,
    "used_bytes": 10 * GiB, "max_bytes": 20 * GiB,
}  # fmt: skip
FORBIDDEN = ApiAnswer(403, missing_right="list things")
_CLIENT = {"version": "0.1.0", "private_reason": "", "is_attached": True}
_DEFINITIONS = {
    document["metadata"]["name"]: document
    for document in (yaml.load(path.read_text(), yaml.CSafeLoader) for path in CRDS)
}


def listing(*items: Any) -> ApiAnswer:
    """Return the answer to a list."""
    return ApiAnswer(200, {"items": list(items)})


def definition(name: str = f"{PLURAL}.{GROUP}") -> dict[str, Any]:
    """Return a CRD as the API server returns it."""
    copied: dict[str, Any] = copy.deepcopy(_DEFINITIONS[name])
    return copied | {"status": {"conditions": [{"type": "Established", "status": "True"}]}}


def deployment(
    name: str = "lmcache",
    *,
    ready: int = 2,
    replicas: int = 2,
    version: str = "0.1.0",
    args: tuple[str, ...] = (),
    seconds: float = 3600.0,
) -> dict[str, Any]:
    """Return the Deployment of an operator. Its readiness changed ``seconds`` ago."""
    since = datetime.fromtimestamp(NOW - seconds, UTC).isoformat()
    labels = {"app.kubernetes.io/version": version}
    template = {"spec": {"serviceAccountName": name, "containers": [{"args": ["run", *args]}]}}
    return {
        "metadata": {"name": name, "namespace": "lmcache-system", "labels": labels},
        "spec": {"replicas": replicas, "template": template},
        "status": {
            "readyReplicas": ready,
            "conditions": [{"type": "Available", "status": "False", "lastTransitionTime": since}],
        },
    }


def engine(
    *args: str, config: Any = None, env: tuple[tuple[str, str], ...] = (("PYTHONHASHSEED", "0"),)
) -> Any:
    """Return the container of an engine with the right arguments, and some more."""
    text = json.dumps(KV_CONFIG if config is None else config)
    words = [f"--kv-transfer-config={text}", *(args or ("--prefix-caching-hash-algo=sha256_cbor",))]
    variables = [{"name": name, "value": value} for name, value in env]
    return {"name": "engine", "command": ["vllm", "serve"], "args": words, "env": variables}


def sglang(*args: str, config: Any = None, backend: str = "dynamic") -> Any:
    """Return the container of an SGLang engine with the right arguments, and some more."""
    text = json.dumps({"interface_v1": 1} if config is None else config)
    words = [f"--hicache-storage-backend={backend}", f"--hicache-storage-backend-extra-config={text}", *args]
    return {"name": "engine", "command": ["python3", "-m", "sglang.launch_server"], "args": words}


def sglang_engines(version: str = "0.5.23", **cache: str) -> list[PodFigures]:
    """Return what an SGLang engine reports."""
    settings = {"page_size": "64", "enable_hierarchical_cache": "True", "disable_radix_cache": "False"}
    return [PodFigures(pod(containers=[sglang()]), {"version": version, "cache": settings | cache})]


def figures(number: int = 0, container: Any = None, **changes: Any) -> PodFigures:
    """Return a healthy engine pod with a remote tier."""
    report = stats(clients=[_CLIENT], time=NOW, remote=remote()) | changes
    return PodFigures(pod(number, containers=[container or engine()]), report, answered_at=NOW)


def remote(*servers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the part of the remote tier in /stats."""
    healthy = {"is_reachable": True, "refused": {}, "shards_problem": "", "residence_seconds": 86400.0}
    return healthy | {"servers": list(servers or [SERVER])} | changes


def server(**changes: Any) -> dict[str, Any]:
    """Return the state of a server in /stats."""
    return SERVER | changes


def cluster_facts(*pods: PodFigures, conditions: Any = (), **changes: Any) -> ClusterFacts:
    """Return a healthy cluster of one pod. Changes are fields of the facts, or parts of the spec."""
    fields = {name: changes.pop(name) for name in ClusterFacts.__dataclass_fields__ if name in changes}
    resource = cluster(**changes)
    listed = conditions or [condition("Ready", "True", "Ready")]
    observed = {"observedGeneration": 1}
    resource["status"] = observed | {"conditions": [each | observed for each in listed]}
    report = {"version": "0.32.0", "cache": {"block_size": "16", "enable_prefix_caching": "True"}}
    engines = [PodFigures(pod(), report)]
    healthy = {
        "pods": pods or (figures(),),
        "engines": engines,
        "trials": [PodTrial("engine", ApiAnswer(200))],
    }
    return ClusterFacts(**({"resource": resource} | healthy | fields))


def facts(*clusters: ClusterFacts, **changes: Any) -> Facts:
    """Return the facts of a healthy installation."""
    listed = clusters or (cluster_facts(),)
    healthy: dict[str, Any] = {
        "namespace": NAMESPACE,
        "now": NOW,
        "version": ApiAnswer(200, {"gitVersion": "v1.36.2"}),
        "core": ApiAnswer(200, {"resources": [{"name": "pods"}, {"name": "pods/resize"}]}),
        "groups": ApiAnswer(200, {"groups": [{"name": "resource.k8s.io"}]}),
        "definitions": {
            f"{plural}.{GROUP}": ApiAnswer(200, definition(f"{plural}.{GROUP}"))
            for plural in (PLURAL, PROFILE_PLURAL)
        },
        "operators": listing(deployment()),
        "policies": listing({"metadata": {"name": "policy"}}),
        "bindings": listing({"metadata": {"name": "binding"}}),
        "profiles": listing({"metadata": {"name": "demo-injection"}}),
        "listed_clusters": listing(*(each.resource for each in listed)),
        "cluster_pods": listing(),
        "injected_pods": listing(),
        "user_rights": dict.fromkeys(USER_RIGHTS, True),
        "operator_rights": dict.fromkeys(OPERATOR_RIGHTS, True),
        "api_offset_seconds": 0.0,
        "clusters": listed,
    }
    return Facts(**(healthy | changes))


def problems(results: list[Result]) -> list[tuple[str, Level, str]]:
    """Return check, level and statement of results that are not ok."""
    return [(each.check, each.level, each.statement) for each in results if each.level is not Level.OK]


def found_problems(*clusters: ClusterFacts, **changes: Any) -> list[tuple[str, Level, str]]:
    """Return what the checks find in an installation with these clusters and changes."""
    return problems(run_checks(facts(*clusters, **changes)))


def check_one(cluster: ClusterFacts, check: str, level: Level, text: str, **changes: Any) -> None:
    """Check that one problem is found, and no other."""
    (problem,) = found_problems(cluster, **changes)
    assert problem[:2] == (check, level)
    assert text in problem[2]


def result_of(check: str, *clusters: ClusterFacts, **changes: Any) -> Result:
    """Return the only result of this check."""
    (result,) = [each for each in run_checks(facts(*clusters, **changes)) if each.check == check]
    return result
