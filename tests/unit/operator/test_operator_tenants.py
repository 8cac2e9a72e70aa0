"""Budgets for tenants: bad specs, the file that sidecars follow, salts from Secrets, and the condition."""

import asyncio
import hashlib
from typing import Any

import pytest
import yaml
from lmcache_operator.api.parse import parse, written
from lmcache_operator.components.base import Context, Probed
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.reconcile.probe import SidecarProber
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from lmcache_sidecar.tenants import MAX_DISK_BYTES

from lmcache.tenant_names import DEFAULT_NAME
from tests.harness.operator_components import ReconciledCluster
from tests.harness.operator_model import cluster
from tests.harness.operator_plans import LATE, settled_world, status_of
from tests.harness.operator_prefill import child, with_prefill

HASH, OTHER_HASH = "a" * 64, "b" * 64
HEADER = "--middleware=lmcache.engines.vllm.tenant_header.TenantHeader"
NO_RUST_SERVER = {"name": "VLLM_USE_RUST_FRONTEND", "value": "0"}
CONFIG, STATEFUL_SET = Ref("ConfigMap", "demo-sidecar"), Ref("StatefulSet", "demo-engine")
SECRET = {"saltSecretRef": {"name": "search-salt"}}


def named(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Changes of a spec: these tenants, named t0, t1 and so on."""
    listed = [{"name": f"t{number}"} | entry for number, entry in enumerate(entries)]
    return {"tenants": {"named": listed, **more}}


def hashed(digit: str, **shares: Any) -> dict[str, Any]:
    return {"saltHash": digit * 64, **shares}


NAMED, DEFAULT = "spec.tenants.named", "spec.tenants.default"
INVALID: list[tuple[dict[str, Any], str, str]] = [
    (named(hashed("a"), hashed("b", name="t0")), NAMED, "two tenants have one name"),
    (named(hashed("a"), hashed("a")), NAMED, "two tenants have the same saltHash"),
    (named(SECRET, SECRET), NAMED, "two tenants have the same saltSecretRef"),
    (
        named(hashed("a", minMemoryPercent=60), SECRET | {"minMemoryPercent": 41}),
        NAMED,
        "must be at most 100",
    ),
    (
        named(hashed("a", memoryPercent=20, minMemoryPercent=30)),
        f"{NAMED}[0]",
        "must be at most memoryPercent",
    ),
    (named(hashed("a") | SECRET), f"{NAMED}[0]", "exactly one of saltHash and saltSecretRef"),
    (named({}), f"{NAMED}[0]", "exactly one of saltHash and saltSecretRef"),
    (named({"saltHash": "A" * 64}), f"{NAMED}[0].saltHash", "does not match"),
    (named({"saltHash": "a" * 63}), f"{NAMED}[0].saltHash", "does not match"),
    (named(hashed("a", name="Search")), f"{NAMED}[0].name", "does not match"),
    (named(hashed("a", name=DEFAULT_NAME)), f"{NAMED}[0].name", "use tenants.default"),
    (named(hashed("a", memoryPercent=0)), f"{NAMED}[0].memoryPercent", "at least 1"),
    (named(hashed("a", memoryPercent=101)), f"{NAMED}[0].memoryPercent", "at most 100"),
    (named(hashed("a", priority=101)), f"{NAMED}[0].priority", "at most 100"),
    (named(hashed("a", priority=-101)), f"{NAMED}[0].priority", "at least -100"),
    (named(hashed("a", lowerTierBytes="1GB")), f"{NAMED}[0].lowerTierBytes", "such as 64Gi"),
    (named(hashed("a", lowerTierBytes="0")), f"{NAMED}[0].lowerTierBytes", "between 1 and 1024Ti"),
    (named(default={"lowerTierBytes": "0.5"}), f"{DEFAULT}.lowerTierBytes", "between 1 and 1024Ti"),
    (named({"saltSecretRef": {"name": "s", "key": "../x"}}), f"{NAMED}[0].saltSecretRef.key", "not match"),
    (named({"saltSecretRef": {"name": "s", "key": "..x"}}), f"{NAMED}[0].saltSecretRef.key", "not match"),
    (named(*[hashed("a", saltHash=f"{n:064x}") for n in range(65)]), NAMED, "more than 64 items"),
    (named(header="yes"), "spec.tenants.header", "must be a boolean, not 'yes'"),
    (named(header=1), "spec.tenants.header", "must be a boolean, not 1"),
    (named(default={"memoryPercent": True}), f"{DEFAULT}.memoryPercent", "must be an integer"),
    (named(default={"minMemoryPercent": 1}), f"{DEFAULT}.minMemoryPercent", "not a known field"),
    (named(header=True) | {"engine": {"kind": "SGLang"}}, "spec", "tenants.header needs engine.kind vLLM"),
    (named() | {"router": {}}, "spec", "set router.policy to CacheAware"),
    (
        with_prefill() | {"router": {"policy": "CacheAware"}} | named(header=True),
        "spec",
        "drops the header with engine.prefill: remove tenants.header",
    ),
    (
        named(default={"memoryPercent": 40}) | {"tiers": {"memory": {"tenantQuotaPercent": 30}}},
        "spec",
        "differ: remove tenantQuotaPercent",
    ),
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
    objects = Engine().render(parse(cluster(**changes)), Context(IMAGES))
    return {
        name: yaml.safe_load(text)
        for item in objects
        if item["kind"] == "ConfigMap"
        for name, text in item["data"].items()
    }


def pod_of(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = Engine().render(parse(cluster(**changes)), Context(IMAGES))[-1]["spec"]["template"]
    return spec["spec"]


def test_file_has_all_budgets_in_bytes_and_per_cent() -> None:
    config = config_of(
        **named(
            SECRET | {"memoryPercent": 50, "minMemoryPercent": 20, "lowerTierBytes": "1.5Gi", "priority": 10},
            hashed("a"),
            default={"memoryPercent": 30, "lowerTierBytes": "1Gi", "priority": -5},
        )
    )
    assert config["tenants.yaml"] == {
        "default": {
            "memoryPercent": 30, "minMemoryPercent": 0, "lowerTierBytes": 1 << 30, "priority": -5,
        },
        "named": [
            {
                "name": "t0", "saltFile": "/etc/lmcache/tenant-salts/search-salt/salt", "memoryPercent": 50,
                "minMemoryPercent": 20, "lowerTierBytes": 3 << 29, "priority": 10,
            },
            {
                "name": "t1", "saltHash": HASH, "memoryPercent": 100, "minMemoryPercent": 0,
                "lowerTierBytes": 0, "priority": 0,
            },
        ],
    }  # fmt: skip
    assert config["sidecar.yaml"]["tenants_file"] == "/etc/lmcache/config/tenants.yaml"


def test_cluster_without_tenants_has_no_file() -> None:
    config = config_of()
    assert config.keys() == {"sidecar.yaml"}
    assert "tenants_file" not in config["sidecar.yaml"]


@pytest.mark.parametrize("default", [{}, {"memoryPercent": 30}])
def test_short_form_is_the_budget_of_other_salts(default: dict[str, Any]) -> None:
    config = config_of(**named(default=default), tiers={"memory": {"tenantQuotaPercent": 30}})
    assert config["tenants.yaml"]["default"]["memoryPercent"] == 30
    assert "tenant_quota_percent" not in config["sidecar.yaml"], "the sidecar would have two values"


def test_salts_are_mounted_into_the_sidecar_alone() -> None:
    pod = pod_of(**named(SECRET, {"saltSecretRef": {"name": "keys", "key": "batch"}}, hashed("a")))
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tenant-salts"]
    assert volume["projected"]["sources"] == [
        {"secret": {"items": [{"key": key, "path": f"{name}/{key}"}], "name": name, "optional": True}}
        for name, key in (("keys", "batch"), ("search-salt", "salt"))
    ]
    mounts = {
        container["name"]: [m for m in container["volumeMounts"] if m["name"] == "tenant-salts"]
        for container in (*pod["initContainers"], *pod["containers"])
    }
    assert mounts["sidecar"] == [{"mountPath": "/etc/lmcache/tenant-salts", "name": "tenant-salts"}]
    assert not mounts["engine"] + mounts["payload"]
    assert all("subPath" not in m for c in pod["initContainers"] for m in c["volumeMounts"]), "not followed"


def test_header_adds_one_middleware() -> None:
    plain, with_header = (pod_of(**named(header=header)) for header in (False, True))
    engines = [pod["containers"][0] for pod in (plain, with_header)]
    assert [*engines[1]["args"]].count(HEADER) == 1
    engines[1]["args"].remove(HEADER)
    engines[1]["env"].remove(NO_RUST_SERVER)
    assert plain == with_header


def test_engines_behind_a_router_refuse_requests_whose_header_it_drops() -> None:
    routed = {"router": {"policy": "CacheAware"}}
    args = pod_of(**named(header=True), **routed)["containers"][0]["args"]
    middleware = [arg for arg in args if "tenant_header" in arg]
    assert middleware == [HEADER.replace("TenantHeader", "RoutedTenantHeader")]


def test_server_that_ignores_the_header_is_refused() -> None:
    rust = {"engine": {"env": [{"name": NO_RUST_SERVER["name"], "value": "1"}]}}
    assert rust["engine"]["env"][0] in pod_of(**named(header=False), **rust)["containers"][0]["env"]
    with pytest.raises(InvalidSpecError, match=r"VLLM_USE_RUST_FRONTEND.*, which the cache depends on"):
        pod_of(**named(header=True), **rust)


def test_tenants_refuse_events_that_publish_their_salts() -> None:
    events = {"engine": {"args": ['--kv-events-config={"enable_kv_cache_events":true}']}}
    with pytest.raises(InvalidSpecError, match=r"args\[0\].*salts of tenants in clear text. Remove"):
        pod_of(**named(), **events)


TWO = named(SECRET, hashed("a", memoryPercent=50))


def test_running_pods_get_new_shares_without_replacement() -> None:
    rig = ReconciledCluster(**TWO)
    rig.settle()
    uids = {pod["metadata"]["uid"] for pod in rig.world.pods.values()}
    rig.world.change(**named(SECRET | {"memoryPercent": 7}, hashed("a")))
    written_objects = rig.settle()
    assert [write for write in written_objects if "StatefulSet" in write or "evict" in write] == []
    content = yaml.safe_load(rig.world.objects[CONFIG]["data"]["tenants.yaml"])
    assert content["named"][0]["memoryPercent"] == 7
    assert {pod["metadata"]["uid"] for pod in rig.world.pods.values()} == uids


def test_prefill_pods_have_the_same_tenants() -> None:
    changes = with_prefill() | named(SECRET, hashed("a", memoryPercent=50))
    derived = child(changes | {"router": {"policy": "CacheAware"}})
    spec = parse(derived).spec
    assert spec.tenants == parse(cluster(**TWO)).spec.tenants
    assert written(spec)["tenants"]["named"][0] == {"name": "t0", "saltSecretRef": {"name": "search-salt"}}


def test_injected_sidecars_have_the_same_tenants_and_engines_no_header() -> None:
    (profile,) = Injection().render(parse(cluster(**named(SECRET, header=True))), Context(IMAGES))
    spec = profile["template"]["spec"]
    (sidecar,) = [each for each in spec["initContainers"] if each["name"] == "lmcache-sidecar"]
    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert "projected" in volumes[mounts["/etc/lmcache/tenant-salts"]]
    assert volumes[mounts["/etc/lmcache/config"]]["configMap"]["name"] == CONFIG.name
    assert not any("tenant_header" in arg for engine in spec["containers"] for arg in engine["args"])


GOOD = {"is_ready": True, "not_ready_reason": "", "num_clients": {"attached": 1}, "remote": None}


def condition(*answers: Any, tenants: Any = {}) -> dict[str, Any]:  # noqa: B006 - never changed
    """Conditions of a cluster whose sidecars answer with these parts about tenants."""
    world = settled_world(engine={"replicas": len(answers)}, tenants=tenants)
    stats = {}
    for number, answer in enumerate(answers):
        address = f"10.0.0.{number}"
        world.pods[f"demo-engine-{number}"]["status"] = {
            "phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}],
        }  # fmt: skip
        stats[address] = GOOD | answer if answer is not None else None

    async def ask(address: str) -> Any:
        return stats[address]

    probed: Probed = asyncio.run(SidecarProber(ask, lambda: 0.0).probe(tuple(world.pods.values())))
    world.resource["status"] = status_of(world, probed=probed, now=LATE)
    return {c["type"]: c for c in world.resource["status"]["conditions"]}


def _declared_digest() -> str:
    """Digest of the file of a cluster with ``tenants: {}``, from its ConfigMap."""
    text = settled_world(tenants={}).objects[CONFIG]["data"]["tenants.yaml"]
    return hashlib.sha256(text.encode()).hexdigest()


DIGEST, OTHER_DIGEST = _declared_digest(), "0" * 64


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
                "salt of tenant search: /x can't be read",
            ),
        ),
        (
            [report(""), using(OTHER_DIGEST), using("")],
            (
                "False", "TenantsPending",
                "2 of 3 sidecars do not use the declared tenants yet. First: pod demo-engine-1. "
                "The kubelet updates the file in running pods within two minutes. If it takes longer, check "
                "the node of the pod. If the node is Ready, delete the pod",
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
                "See the condition SidecarAttached",
            ),
        ),
        ([{}, None], ("Unknown", "NoAnswer", None)),
        ([None], ("Unknown", "NoAnswer", None)),
    ],
)  # fmt: skip
def test_sidecars_reports_become_a_condition(answers, expected):
    known = condition(*answers)["TenantsKnown"]
    assert (known["status"], known["reason"]) == expected[:2]
    assert expected[2] is None or known["message"] == expected[2]


def test_problem_names_the_present_secret() -> None:
    """Names of Secrets often differ in a figure only. An earlier name would mislead."""
    world = settled_world(engine={"replicas": 1}, tenants={})
    (pod,) = world.pods.values()
    pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": []}
    problems = [f"salts/salt-{number} can't be read" for number in (1, 2)]
    answers = iter([GOOD | report(problem) for problem in problems])

    async def ask(address: str) -> Any:
        return next(answers)

    prober = SidecarProber(ask, lambda: 0.0)
    probed = [asyncio.run(prober.probe((pod,))) for _ in problems]
    assert [each.sidecars[0].tenants_problem for each in probed] == problems


def test_problem_of_tenants_degrades_the_cluster() -> None:
    degraded = condition(report("x"))["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "TenantsInvalid")


def test_cluster_without_tenants_has_no_condition() -> None:
    assert "TenantsKnown" not in condition(report("left from before"), tenants=None)


def test_former_file_does_not_degrade_the_cluster() -> None:
    conditions = condition(using(OTHER_DIGEST))
    assert (conditions["Degraded"]["status"], conditions["Ready"]["status"]) == ("False", "True")
