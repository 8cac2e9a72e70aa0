"""Prompts and answers on different pods with two data-parallel ranks each, a real router and engines.

The tests depend on their order.
"""

import re
from collections.abc import Iterator

import pytest

from testing.kube.api import Object
from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE, App
from testing.node.pods import ENGINE_PORT, Completion, Pod, complete
from testing.router import last_event
from tests.harness.operator.client_pods import client_pod
from tests.harness.operator.pods import least_cached, prompt

NAME, PEERS_PORT, EVENTS_PORT = "split", 9465, 5557
CHILD = f"{NAME}-prefill"
RANKS = 0, 1
PROMPTS = [prompt(seed, 2048) for seed in range(101, 109)]
ANSWER_SECONDS = "2"
"""Time for peers to answer. The default of 5 ms is for a machine that is not busy."""
SECONDS = 300
"""The kubelet updates a mounted ConfigMap within a minute and a half."""


@pytest.fixture(scope="module")
def app(make_app) -> Iterator[App]:
    app: App = make_app(NAME, peers={})
    spec = app.spec["spec"]
    del spec["tiers"]["remote"]
    patient = {"name": "LMCACHE_PEER_ANSWER_SECONDS", "value": ANSWER_SECONDS}
    spec["engine"]["podTemplate"]["spec"]["initContainers"] = [{"name": "sidecar", "env": [patient]}]
    spec["engine"] |= {"parallelism": {"data": len(RANKS)}, "prefill": {"replicas": 1}}
    # The router logs the KV events that it gets only at this level.
    args, resources = ["--log-level=debug"], {"requests": {"cpu": "100m"}}
    spec["router"] = {"policy": "KVAware", "replicas": 1, "args": args, "resources": resources}
    app.apply()
    yield app
    app.delete()


@pytest.fixture(scope="module")
def pools(app) -> App:
    """The prefill pods, as the LMCacheCluster that the operator makes of them."""
    child: Object = app.node.wait(lambda: app.node.api.find(CLUSTERS, CHILD, NAMESPACE), 120)
    return App(app.node, child)


def peers_of(pod: Pod) -> dict[str, str]:
    """The problem of each peer of a pod, by the peer's StatefulSet; an empty text if it answers."""
    servers = pod.stats()["peers"]["servers"]
    return {server["name"].partition(".")[0].rpartition("-")[0]: server["problem"] for server in servers}


def tokens(pod: Pod, cause: str) -> int:
    return int(pod.stats()["causes"]["cause_tokens"].get(cause, 0))


def ask_router(app: App, question: list[int]) -> Completion:
    service = app.node.api.get("v1/services", f"{NAME}-router", NAMESPACE)
    return complete(service["spec"]["clusterIP"], question, 8)


def router_pod(app: App) -> Pod:
    """The router's pod, after the former pod, which used no prefill pods, has ended."""
    labels = f"lmcache.io/cluster={NAME},lmcache.io/component=router"

    def only_pod() -> Object | None:
        pods = app.node.api.objects("v1/pods", NAMESPACE, labels)
        is_new = len(pods) == 1 and "--prefill-selector" in pods[0]["spec"]["containers"][0]["args"]
        return pods[0] if is_new else None

    return Pod(app.node, app.node.wait(only_pod, SECONDS))


def test_both_pools_are_available_and_read_each_other(app, pools):
    decode, prefill = app.ready_pod(), pools.ready_pod()
    app.wait_condition("PrefillAvailable")
    router_pod(app)
    app.wait_condition("RouterAvailable")
    app.wait_condition("Ready")
    app.node.wait(lambda: peers_of(decode) == {f"{CHILD}-engine": ""}, SECONDS)
    app.node.wait(lambda: peers_of(prefill) == {f"{NAME}-engine": ""}, SECONDS)


def test_answer_is_that_of_one_engine_and_its_prompt_comes_from_the_prefill_pod(app, pools):
    """The router asks the prefill pod first. An engine on a busy machine may compute instead of waiting."""
    decode, prefill = app.ready_pod(), pools.ready_pod()
    app.node.wait(lambda: ask_router(app, prompt(100)), 60)  # kube-proxy follows a ready pod within seconds
    for question in PROMPTS:
        answer = ask_router(app, question)
        assert len(answer.tokens) == 8
        assert answer.tokens == prefill.complete(question).tokens
        if tokens(decode, "peers"):
            break
    else:
        raise AssertionError(f"no prompt was loaded from the prefill pod: {decode.stats()['peers']}")
    assert prefill.stats()["peer_server"]["read_columns"] > 0
    assert tokens(prefill, "peers") == 0


def ask_rank(pod: Pod, question: list[int], rank: int) -> Completion:
    return complete(pod.address, question, headers={"X-data-parallel-rank": str(rank)})


def num_stored_rows(pod: Pod, rank: int) -> float:
    metrics = pod.get(ENGINE_PORT, "/metrics").decode()
    (number,) = re.findall(rf'^vllm:lmcache_stored_rows_total{{.*engine="{rank}".*}} (\S+)$', metrics, re.M)
    return float(number)


def test_rank_hits_what_the_other_rank_of_its_pod_computed(app):
    pod, question = app.ready_pod(), prompt(110, 2048)
    num_rows = num_stored_rows(pod, 0) + len(question) // 256
    computed = ask_rank(pod, question, 0)
    app.node.wait(lambda: num_stored_rows(pod, 0) >= num_rows)
    loaded = ask_rank(pod, question, 1)
    assert (computed.num_cached, loaded.tokens) == (0, computed.tokens)
    assert loaded.num_cached >= least_cached(question), "the rank's own cache is empty"


def test_router_gets_kv_events_of_both_ranks_through_the_network_policies(app, pools, references):
    router, prefill = router_pod(app), pools.ready_pod()

    def has_taken(rank: int) -> bool:
        ask_rank(prefill, prompt(120 + rank), rank)
        return last_event(router.logs("router"), "", rank) >= 0

    for rank in RANKS:
        app.node.wait(
            lambda rank=rank: f"{prefill.address}:{EVENTS_PORT + rank}" in router.logs("router"), 60
        )
        app.node.wait(lambda rank=rank: has_taken(rank), 60)
    with client_pod(app.node, NAMESPACE, references["sidecar"]) as client:
        app.node.wait(lambda: client.reaches(prefill, 9464), 60)
        assert not client.reaches(prefill, PEERS_PORT)
        assert not any(client.reaches(prefill, EVENTS_PORT + rank) for rank in RANKS)
