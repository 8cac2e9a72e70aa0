"""The router: its objects, the events of its engines, and its status."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lmcache_operator.api.parse import Platform, parse
from lmcache_operator.api.router import POLICIES
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.kinds.vllm import DISCOVERY
from lmcache_operator.components.router.router import Routing
from lmcache_operator.contract.base import Observed, Plan
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import names
from lmcache_operator.specs.kinds import Ref
from tests.harness.operator.model import cluster
from tests.harness.operator.plans import EARLY
from tests.harness.operator.render import CONTEXT, child_of, children, pod_of

DEPLOYMENT = Ref("Deployment", "demo-router")


def routing(**spec: Any) -> dict[Ref, Any]:
    return children(Routing(), **spec)


def router_args(**router: Any) -> list[str]:
    return routing(router=router)[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]["args"]


def engine_args(**spec: Any) -> list[str]:
    return pod_of(**spec)["containers"][0]["args"]


def test_clients_and_routers_reach_only_pods_with_a_server() -> None:
    engine = {"nodes": 2, "parallelism": {"tensor": 2}}
    first = {"lmcache.io/cluster": "demo", "lmcache.io/component": "engine", names.POD_INDEX_LABEL: "0"}
    services = children(Engine(), engine=engine)
    assert services[Ref("Service", "demo")]["spec"]["selector"] == first
    assert names.POD_INDEX_LABEL not in services[Ref("Service", "demo-engine")]["spec"]["selector"]
    (router,) = routing(router={}, engine=engine)[DEPLOYMENT]["spec"]["template"]["spec"]["containers"]
    selector = router["args"].index("--selector")
    assert router["args"][selector + 1 : selector + 4] == [*map("=".join, first.items())]


def test_router_may_only_find_pods_of_its_namespace() -> None:
    rendered = routing(router={})
    role, binding = (rendered[Ref(kind, "demo-router")] for kind in ("Role", "RoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    (subject,) = binding["subjects"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", "demo-router")
    assert (subject["name"], subject["namespace"]) == ("demo-router", role["metadata"]["namespace"])
    pod = rendered[DEPLOYMENT]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "demo-router"
    assert pod["automountServiceAccountToken"] is True


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--policy=random", "it is set by spec.router.policy"),
        ("--pol=random", "it is set by spec.router.policy"),
        ("--worker-urls", "finds its engines by their labels"),
        ("--worker_urls=http://a", "finds its engines by their labels"),
        ("--kv-event-source=a=b", "report the sources of their KV events themselves"),
        ("--vllm-pd-disaggregation", "if spec.engine.prefill is set"),
        ("--decode-sel=a=b", "if spec.engine.prefill is set"),
        ("--prefill=http://a", "finds its engines by their labels"),
        ("--kv-connector=mooncake", "sidecars hand KV over"),
    ],
)
def test_arguments_that_the_operator_sets_are_refused(argument: str, reason: str) -> None:
    with pytest.raises(InvalidSpecError, match=reason) as caught:
        router_args(args=[argument])
    assert str(caught.value).startswith("spec.router.args[0]")


def test_engines_with_https_only_are_refused() -> None:
    secure = {"args": ["--ssl-certfile=/a", "--ssl-keyfile=/b"]}
    for engine in (secure, {"prefill": secure}):
        with pytest.raises(InvalidSpecError, match="remove --ssl-certfile"):
            routing(router={}, tiers={"peers": {}}, engine=engine)


@pytest.mark.parametrize(("host", "primary_host"), [("::", "::"), ("::", "0.0.0.0")])
def test_router_that_reads_events_is_refused_if_it_cannot_reach_them(host: str, primary_host: str) -> None:
    platform = Platform(host=host, primary_host=primary_host)
    for policy in POLICIES:
        resource = replace(parse(cluster(router={"policy": policy})), platform=platform)
        if policy == "KVAware" and primary_host == "::":
            with pytest.raises(InvalidSpecError, match=r"^spec.router.policy: .*use CacheAware"):
                Routing().render(resource, CONTEXT)
        else:
            assert Routing().render(resource, CONTEXT)


@pytest.mark.parametrize("policy", ["KVAware", "CacheAware"])
def test_engines_publish_events_only_to_a_router_that_reads_them(policy: str) -> None:
    args = engine_args(router={"policy": policy})
    events = [arg for arg in args if arg.startswith("--kv-events-config=")]
    assert bool(events) == (policy == "KVAware")
    assert DISCOVERY in args, "the router asks for the tokens of prompts of text"
    rules = child_of("NetworkPolicy", router={"policy": policy})["spec"]["ingress"]
    closed = [rule for rule in rules if rule.get("from") and rule["ports"][0]["port"] == 5557]
    everyone = [port for rule in rules if "from" not in rule for port in rule["ports"]]
    is_open = any(p["protocol"] == "TCP" and p["port"] <= 5557 <= p["endPort"] for p in everyone)
    assert is_open == (policy != "KVAware")
    if events:
        config = json.loads(events[0].partition("=")[2])
        assert config == {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "publisher": "zmq"}
        (rule,) = closed
        labels = {"lmcache.io/cluster": "demo", "lmcache.io/component": "router"}
        assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    else:
        assert not closed


@pytest.mark.parametrize(("kind", "policy"), [("SGLang", "CacheAware"), ("vLLM", "PowerOfTwo")])
def test_other_engines_tokenize_no_prompts_for_the_router(kind: str, policy: str) -> None:
    """SGLang has no middlewares, and other policies need no tokens."""
    assert DISCOVERY not in engine_args(engine={"kind": kind}, router={"policy": policy})


def test_all_other_ports_of_an_engine_stay_as_they_are() -> None:
    rules = child_of("NetworkPolicy", router={})["spec"]["ingress"]
    entries = [entry for rule in rules if "from" not in rule for entry in rule["ports"]]
    ranges = [range(each["port"], each["endPort"] + 1) for each in entries if each["protocol"] == "TCP"]
    open_ports = {port for each in ranges for port in each}
    assert set(range(1, 65536)) - open_ports == {5557, 9464}


def test_events_of_the_user_are_refused_only_with_a_router_that_reads_events() -> None:
    user = {"args": ['--kv-events-config={"enable_kv_cache_events":true}']}
    assert user["args"][0] in engine_args(engine=user, router={"policy": "RoundRobin"})
    with pytest.raises(InvalidSpecError, match="the router needs its own events"):
        engine_args(engine=user, router={})


LIVE = routing(router={})[DEPLOYMENT]


def observed(live: Any = LIVE) -> Observed:
    return Observed(resource=cluster(router={}), children={DEPLOYMENT: live}, now=EARLY)


def test_upgrade_of_the_operator_keeps_the_image() -> None:
    def image(**changes: Any) -> str:
        later = CONTEXT._replace(router_image="router:later")
        wanted = Routing().plan(parse(cluster(**changes)), observed(), later).apply
        (deployment,) = [item for item in wanted if item["kind"] == "Deployment"] or [LIVE]
        return deployment["spec"]["template"]["spec"]["containers"][0]["image"]

    assert image(router={}) == CONTEXT.router_image
    assert image(router={}, images={"policy": "Follow"}) == "router:later"
    assert image(router={"image": "mine:1"}) == "mine:1"


def status_with(**status: Any) -> Any:
    live = LIVE | {"metadata": LIVE["metadata"] | {"generation": 3, "uid": "u"}}
    state = observed(live | {"status": {"replicas": 2, "updatedReplicas": 2} | status})
    return Routing().status(state, Routing().plan(parse(state.resource), state, CONTEXT))


@pytest.mark.parametrize(
    ("router", "problems", "serves"),
    [
        ({}, (), False),
        ({}, (Problem("NameTaken", "another Deployment has the name"),), False),
        ({}, (Problem("InvalidSpec", "the engines serve as before"),), None),
        (None, (), None),
    ],
)
def test_missing_router_serves_nothing(router: Any, problems: Any, serves: Any) -> None:
    """The API server refuses its Deployment, or another owner has its name: clients reach no engine."""
    spec = {} if router is None else {"router": router}
    state = Observed(resource=cluster(**spec), children={}, now=EARLY)
    assert Routing().status(state, Plan(problems=problems)).serves is serves


def test_status_follows_the_deployment() -> None:
    starting = status_with(observedGeneration=3)
    assert starting.conditions["RouterAvailable"][:2] == ("False", "RouterNotReady")
    assert (starting.progressing[:2], starting.serves) == (("True", "Starting"), False)
    assert not starting.degraded
    ready = status_with(observedGeneration=3, readyReplicas=2)
    assert ready.conditions["RouterAvailable"][:2] == ("True", "RouterReady")
    assert (ready.progressing[:2], ready.summary) == (("False", "Complete"), "2 of 2 routers are ready")
    assert ready.serves
    assert ready.fields == {"router": {"pools": 1, "replicas": 2, "readyReplicas": 2}}
    assert status_with(observedGeneration=2, readyReplicas=2).progressing[:2] == ("True", "Starting")


def test_pods_that_do_not_start_degrade_the_cluster() -> None:
    stuck = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
    status = status_with(observedGeneration=3, conditions=[stuck])
    assert tuple(status.degraded[0]) == ("RouterNotReady", "0 of 2 routers are ready: deadline exceeded")
    assert status.progressing.status == "False"
