"""Budgets for tenants: bad specs, the file that sidecars follow, salts from Secrets, and the condition."""

import hashlib
from typing import Any

import pytest
import yaml

from lmcache_operator.api.parse import parse, written
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.merge import merge
from lmcache_sidecar.files.tenants import MAX_DISK_BYTES
from lmcache_store.tenant_names import DEFAULT_NAME
from tests.harness.operator.components import GOOD, ReconciledCluster
from tests.harness.operator.model import World, cluster
from tests.harness.operator.plans import settled_world, status_of
from tests.harness.operator.prefill import child, with_prefill
from tests.harness.operator.render import child_of, container, part, pod_of

HEADER = "--middleware=lmcache_client.vllm.tenant_header.TenantHeader"
NO_RUST_SERVER = {"name": "VLLM_USE_RUST_FRONTEND", "value": "0"}
CONFIG = Ref("ConfigMap", "demo-sidecar")
SECRET = {"saltSecretRef": {"name": "search-salt"}}


def named(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Changes of a spec: these tenants, named t0, t1 and so on."""
    listed = [{"name": f"t{number}"} | entry for number, entry in enumerate(entries)]
    return {"tenants": {"named": listed, **more}}


def hashed(digit: str, **shares: Any) -> dict[str, Any]:
    return {"saltHash": digit * 64, **shares}


CACHE_AWARE, BY_LOAD = ({"router": {"policy": policy}} for policy in ("CacheAware", "PowerOfTwo"))
ONE_POOL = {"router": {"policy": "RoundRobin", "args": ["--prefill-pol=cache_aware"]}}
NAMED, DEFAULT = "spec.tenants.named", "spec.tenants.default"
INVALID: list[tuple[dict[str, Any], str, str]] = [
    (named(hashed("a"), hashed("b", name="t0")), NAMED, "two tenants have one name"),
    (named(hashed("a"), hashed("a")), NAMED, "two tenants have the same saltHash"),
    (named(SECRET, SECRET), NAMED, "two tenants have the same saltSecretRef"),
    (named(hashed("a", minMemoryPercent=60), SECRET | {"minMemoryPercent": 41}), NAMED, "be at most 100"),
    (named(hashed("a", memoryPercent=20, minMemoryPercent=30)), f"{NAMED}[0]", "be at most memoryPercent"),
    (named(hashed("a") | SECRET), f"{NAMED}[0]", "exactly one of saltHash and saltSecretRef"),
    (named({}), f"{NAMED}[0]", "exactly one of saltHash and saltSecretRef"),
    (named({"saltHash": "A" * 64}), f"{NAMED}[0].saltHash", "does not match"),
    (named({"saltHash": "a" * 63}), f"{NAMED}[0].saltHash", "does not match"),
    (named(hashed("a", name="Search")), f"{NAMED}[0].name", "does not match"),
    (named(hashed("a", name=DEFAULT_NAME)), f"{NAMED}[0].name", "use tenants.default"),
    (named(hashed("a", memoryPercent=0)), f"{NAMED}[0].memoryPercent", "at least 1"),
    (named(hashed("a", retainPercent=101)), f"{NAMED}[0].retainPercent", "at most 100"),
    (named(default={"retainPercent": -1}), f"{DEFAULT}.retainPercent", "at least 0"),
    (named(hashed("a", priority=101)), f"{NAMED}[0].priority", "at most 100"),
    (named(hashed("a", priority=-101)), f"{NAMED}[0].priority", "at least -100"),
    (named(hashed("a", lowerTierBytes="1GB")), f"{NAMED}[0].lowerTierBytes", "such as 64Gi"),
    (named(hashed("a", lowerTierBytes="0")), f"{NAMED}[0].lowerTierBytes", "between 1 and 1024Ti"),
    (named(default={"lowerTierBytes": "0.5"}), f"{DEFAULT}.lowerTierBytes", "between 1 and 1024Ti"),
    (named({"saltSecretRef": {"name": "s", "key": "../x"}}), f"{NAMED}[0].saltSecretRef.key", "not match"),
    (named(*[hashed("a", saltHash=f"{n:064x}") for n in range(65)]), NAMED, "more than 64 items"),
    (named(header="yes"), "spec.tenants.header", "must be a boolean, not 'yes'"),
    (named(header=1), "spec.tenants.header", "must be a boolean, not 1"),
    (named(default={"memoryPercent": True}), f"{DEFAULT}.memoryPercent", "must be an integer"),
    (named(default={"minMemoryPercent": 1}), f"{DEFAULT}.minMemoryPercent", "not a known field"),
    (named(header=True) | {"engine": {"kind": "SGLang"}}, "spec", "tenants.header needs engine.kind vLLM"),
    (named() | {"router": {}}, "spec", "router.policy must be PowerOfTwo or RoundRobin, or CacheAware"),
    (named() | {"router": {"policy": "ConsistentHash"}}, "spec", "depend on other tenants' prompts"),
    (named(header=True) | CACHE_AWARE, "spec", "or CacheAware without tenants.header"),
    (with_prefill() | named() | ONE_POOL, "spec", "use router.policy for both pools"),
    (with_prefill() | BY_LOAD | named(header=True), "spec", "the header with engine.prefill: remove ten"),
]


@pytest.mark.parametrize(("changes", "path", "sentence"), INVALID)
def test_invalid_tenants_are_refused_with_their_field(changes, path, sentence):
    with pytest.raises(InvalidSpecError) as caught:
        parse(cluster(**changes))
    assert caught.value.path.startswith(path)
    assert sentence in str(caught.value)


def test_upper_bound_of_bytes_is_that_of_sidecars() -> None:
    assert parse(cluster(**named(hashed("a", lowerTierBytes=f"{MAX_DISK_BYTES >> 40}Ti"))))
    with pytest.raises(InvalidSpecError, match="between 1 and 1024Ti"):
        parse(cluster(**named(hashed("a", lowerTierBytes=str(MAX_DISK_BYTES + 1)))))


def config_of(**changes: Any) -> dict[str, Any]:
    """Content of the sidecars' ConfigMap."""
    data = child_of("ConfigMap", **changes)["data"]
    return {name: yaml.safe_load(text) for name, text in data.items()}


@pytest.mark.parametrize(("default", "percent"), [({}, 100), ({"memoryPercent": 30}, 30)])
def test_default_is_the_budget_of_other_salts(default: dict[str, Any], percent: int) -> None:
    config = config_of(**named(default=default))
    assert config["tenants.yaml"]["default"]["memoryPercent"] == percent


def test_engines_behind_a_router_refuse_requests_whose_header_it_drops() -> None:
    args = pod_of(**named(header=True), **BY_LOAD)["containers"][0]["args"]
    middleware = [arg for arg in args if "tenant_header" in arg]
    assert middleware == [HEADER.replace("TenantHeader", "RoutedTenantHeader")]


def test_tenants_are_set_before_hints_are_read() -> None:
    """vLLM passes a request to the last middleware first."""
    args = pod_of(**named(header=True) | {"engine": {"hintsRoute": True}})["containers"][0]["args"]
    middlewares = [arg for arg in args if arg.startswith("--middleware")]
    assert middlewares == ["--middleware=lmcache_client.vllm.hints_route.HintsRoute", HEADER]


def test_server_that_ignores_middlewares_is_refused() -> None:
    rust = {"engine": {"env": [NO_RUST_SERVER | {"value": "1"}]}}
    assert rust["engine"]["env"][0] in pod_of(**named(header=False), **rust)["containers"][0]["env"]
    for changes in (named(header=True), {"engine": {"hintsRoute": True}}):
        with pytest.raises(InvalidSpecError, match=r"VLLM_USE_RUST_FRONTEND.*, which the cache depends on"):
            pod_of(**merge(rust, changes))


def test_tenants_refuse_events_that_publish_their_salts() -> None:
    events = {"engine": {"args": ['--kv-events-config={"enable_kv_cache_events":true}']}}
    with pytest.raises(InvalidSpecError, match=r"args\[0\].*salts of tenants in clear text. Remove"):
        pod_of(**named(), **events)


TWO = named(SECRET, hashed("a", memoryPercent=50))


def test_prefill_pods_have_the_same_tenants() -> None:
    changes = with_prefill() | named(SECRET, hashed("a", memoryPercent=50))
    spec = parse(child(changes | CACHE_AWARE)).spec
    assert spec.tenants == parse(cluster(**TWO)).spec.tenants
    assert written(spec)["tenants"]["named"][0] == {"name": "t0", "saltSecretRef": {"name": "search-salt"}}


def test_injected_sidecars_have_the_same_tenants_and_engines_no_header() -> None:
    changes = named(SECRET, header=True)
    spec = child_of("LMCacheProfile", Injection(), **changes)["template"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in container(spec, "lmcache-sidecar")["volumeMounts"]}
    assert "projected" in part(spec["volumes"], mounts["/etc/lmcache/tenant-salts"])
    assert part(spec["volumes"], mounts["/etc/lmcache/config"])["configMap"]["name"] == CONFIG.name
    assert not any("tenant_header" in arg for engine in spec["containers"] for arg in engine["args"])


def digest_of(world: World) -> str:
    text = world.objects[CONFIG]["data"]["tenants.yaml"]
    return hashlib.sha256(text.encode()).hexdigest()


DIGEST, OTHER_DIGEST = digest_of(settled_world(tenants={})), "0" * 64


def conditions(*answers: Any, tenants: Any = {}) -> dict[str, Any]:  # noqa: B006 - never changed
    """Conditions of a cluster whose sidecars answer with these parts about tenants."""
    rig = ReconciledCluster.settled(engine={"replicas": len(answers)}, tenants=tenants)
    rig.answer(*(answer if answer is None else GOOD | answer for answer in answers))
    rig.run()
    return {c["type"]: c for c in rig.world.resource["status"]["conditions"]}


def report(problem: Any, **digest: Any) -> dict[str, Any]:
    return {"tenants": {"tenants_problem": problem, "tenants_digest": DIGEST} | digest}


def using(digest: Any) -> dict[str, Any]:
    return report("", tenants_digest=digest)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([report(""), report("")], ("True", "TenantsInUse", "All 2 sidecars use the declared tenants.")),
        (
            [report(""), report("salt of tenant search: /x can't be read")],
            (
                "False", "TenantsInvalid",
                "1 of 2 sidecars cannot use all of spec.tenants. First: pod demo-engine-1: "
                "salt of tenant search: /x can't be read.",
            ),
        ),
        (
            [report(""), using(OTHER_DIGEST), using("")],
            (
                "False", "TenantsPending",
                "2 of 3 sidecars do not use the declared tenants yet. First: pod demo-engine-1. "
                "The kubelet updates the file in running pods within two minutes. If it takes longer, check "
                "the node of the pod. If the node is Ready, delete the pod.",
            ),
        ),
        ([report(""), {}], ("Unknown", "NotReported", None)),
        ([{}, report("no")], ("False", "TenantsInvalid", None)),
        ([using(OTHER_DIGEST), report("no")], ("False", "TenantsInvalid", None)),
        ([using(OTHER_DIGEST), {}, None], ("False", "TenantsPending", None)),
        ([report(None, tenants_digest=None)], ("Unknown", "NotReported", None)),  # a pod without the file
        ([{"tenants": {"tenants_problem": ""}}], ("Unknown", "NotReported", None)),  # an earlier version
        ([{"tenants": {"tenants_problem": "no"}}], ("False", "TenantsInvalid", None)),
        ([{"tenants": "odd"}], ("Unknown", "NotReported", None)),
        ([using(["not", "text"])], ("Unknown", "NotReported", None)),
        ([using(DIGEST.upper())], ("False", "TenantsPending", None)),
        ([using("x" * 5000)], ("False", "TenantsPending", None)),
        (
            [report(""), None],
            (
                "Unknown", "NoAnswer",
                "1 of 2 sidecars do not report which tenants they use. First: pod demo-engine-1. "
                "See the condition SidecarAttached.",
            ),
        ),
        ([{}, None], ("Unknown", "NoAnswer", None)),
        ([None], ("Unknown", "NoAnswer", None)),
    ],
)  # fmt: skip
def test_sidecars_reports_become_a_condition(answers, expected):
    by_type = conditions(*answers)
    known = by_type["TenantsKnown"]
    assert (known["status"], known["reason"]) == expected[:2]
    is_invalid = known["reason"] == "TenantsInvalid"
    assert (by_type["Degraded"]["status"], by_type["Ready"]["status"]) == (str(is_invalid), "True")
    assert expected[2] is None or known["message"] == expected[2]


def test_problem_names_the_present_secret() -> None:
    """Names of Secrets often differ in a figure only. An earlier name would mislead."""
    rig = ReconciledCluster.settled(tenants={})
    for number in (1, 2):
        problem = f"salts/salt-{number} can't be read"
        rig.answer(GOOD | report(problem))
        rig.run()
        assert problem in rig.message("TenantsKnown")
        assert problem in str(status_of(rig.world, probed=None)), "no sidecar was polled"


def test_cluster_without_tenants_has_no_condition() -> None:
    assert "TenantsKnown" not in conditions(report("left from before"), tenants=None)
