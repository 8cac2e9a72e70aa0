"""Budgets of tenants on a real kubelet: salts by header and body, a deleted Secret, documents.

The tests depend on their order, and share one LMCacheCluster.
"""

import itertools
import time
from collections.abc import Iterator

import pytest

from lmcache_store import keys
from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE, READY_SECONDS, App
from testing.node.pods import Completion, Pod
from tests.harness.operator.pods import least_cached, prompt

SEARCH, BATCH = "salt of search", "salt of batch"
SECRET = "search-salt"
PROMPT = prompt(47, 1024)
NUM_ROWS = len(PROMPT) // 256
KUBELET_SECONDS = 300
"""A kubelet updates mounted ConfigMaps and Secrets within two minutes. A busy machine needs longer."""


@pytest.fixture(scope="module")
def app(make_app, installed) -> Iterator[App]:
    create_secret(installed)
    app = make_app("tenants")
    app.spec["spec"]["tenants"] = {
        "header": True,
        "named": [
            {"name": "search", "saltSecretRef": {"name": SECRET}, "minMemoryPercent": 20},
            {"name": "batch", "saltHash": keys.salt_hash(BATCH).hex(), "memoryPercent": 50},
        ],
    }
    app.spec["spec"]["engine"]["blend"] = {"mode": "Auto"}
    app.apply()
    yield app
    app.delete()


def create_secret(node) -> None:
    secret = {"metadata": {"name": SECRET}, "stringData": {"salt": SEARCH}}
    node.api.create("v1/secrets", secret, NAMESPACE)


def reconcile(app: App) -> None:
    """Let the operator look at the cluster now. No watch reports what a sidecar does."""
    change = {"metadata": {"annotations": {"test/poke": str(time.monotonic_ns())}}}
    app.node.api.patch(CLUSTERS, app.name, change, NAMESPACE)


def tenants(pod: Pod):
    return pod.stats()["tenants"]


def status_with_hits(app: App):
    """Figures in the status by the name of the tenant, as soon as the tenant batch has prompts; else None."""
    status = app.node.api.get(CLUSTERS, app.name, NAMESPACE)["status"]
    listed = {tenant.pop("name"): tenant for tenant in status.get("tenants", ())}
    return listed if "hitPercent" in listed.get("batch", {}) else None


def hit_of_search(pod: Pod) -> Completion:
    """Repeat the prompt as the tenant search until the sidecar has its rows, and return that answer."""

    def ask() -> Completion | None:
        pod.reset_engine_cache()
        answer = pod.complete(PROMPT, salt_header=SEARCH)
        return answer if answer.num_cached >= least_cached(PROMPT) else None

    return pod.node.wait(ask, READY_SECONDS)


def test_requests_count_for_the_tenant_of_their_header_or_body(app):
    pod = app.ready_pod()
    assert app.wait_condition("TenantsKnown")["reason"] == "TenantsInUse"
    cold = pod.complete(PROMPT, salt_header=SEARCH)
    assert cold.num_cached == 0
    assert hit_of_search(pod).tokens == cold.tokens
    pod.reset_engine_cache()
    assert pod.complete(PROMPT, cache_salt=BATCH).num_cached == 0, "salts separate the same prompt"
    app.node.wait(lambda: tenants(pod)["rows"]["batch"] == NUM_ROWS, READY_SECONDS)
    stats = tenants(pod)
    assert stats["rows"]["search"] == NUM_ROWS
    assert stats["prompt_tokens"]["batch"] == len(PROMPT)
    assert least_cached(PROMPT) <= stats["hit_tokens"]["search"] < stats["prompt_tokens"]["search"]
    assert stats["hit_tokens"]["batch"] == 0
    reconcile(app)
    listed = app.node.wait(lambda: status_with_hits(app), 60)
    assert list(listed) == ["default", "search", "batch"]
    assert 0 < listed["search"]["hitPercent"] < 100
    assert listed["batch"]["hitPercent"] == 0
    assert listed["default"].get("hitPercent", 0) == 0
    shares = [figures["usedMemoryPercent"] for figures in listed.values()]
    assert all(0 <= share < 100 for share in shares)
    usable = pod.stats()["memory"]["usable_bytes"]
    assert listed["search"]["usedMemoryPercent"] == 100 * stats["bytes"]["search"] // usable


def test_cache_serves_without_the_secret_and_the_status_says_so(app):
    pod = app.ready_pod()
    before = hit_of_search(pod)
    app.node.api.delete("v1/secrets", SECRET, NAMESPACE)
    app.node.wait(lambda: tenants(pod)["tenants_problem"], KUBELET_SECONDS)
    reconcile(app)
    condition = app.wait_condition("TenantsKnown", "False")
    assert condition["reason"] == "TenantsInvalid"
    assert f"/{SECRET}/salt can't be read: check that the Secret exists" in condition["message"]
    assert SEARCH not in condition["message"]
    assert app.conditions()["Degraded"]["reason"] == "TenantsInvalid"
    rows = tenants(pod)["rows"]["search"]
    assert hit_of_search(pod).tokens == before.tokens
    assert tenants(pod)["rows"]["search"] == rows == NUM_ROWS, "the tenant has its budget"
    create_secret(app.node)
    app.wait_condition("TenantsKnown")
    assert not tenants(pod)["tenants_problem"]
    assert app.ready_pod().uid == pod.uid


def num_reused(pod: Pod, question: list[int], salt: str, **body) -> int:
    """Tokens of a prompt that the engine reuses at another position."""
    before = pod.stats()["causes"]
    pod.complete(question, 1, salt_header=salt, **body)

    def counted():
        causes = pod.stats()["causes"]
        return causes if causes["prompt_tokens"] == before["prompt_tokens"] + len(question) else None

    causes = pod.node.wait(counted, 60)
    return sum(each["cause_tokens"].get("blended", 0) * sign for each, sign in ((causes, 1), (before, -1)))


def test_document_of_a_tenant_is_reused_in_its_prompts_only(app):
    """No prompt names its document. A busy engine may compute a prompt instead of waiting for a lookup."""
    pod, document, seeds = app.ready_pod(), prompt(48, 1000), itertools.count(100)
    announced = {"kv_transfer_params": {"lmcache": {"document": True}}}
    assert num_reused(pod, document, SEARCH, **announced) == 0

    def ask(salt: str) -> int:
        return num_reused(pod, prompt(next(seeds), 40) + document + prompt(next(seeds), 40), salt)

    assert 0 < app.node.wait(lambda: ask(SEARCH), READY_SECONDS) <= len(document)
    assert ask(BATCH) == 0
