"""Rows that sidecars encrypt, on a real kubelet: rotation of keys, a deleted Secret.

The tests depend on their order, and share one LMCacheCluster.
"""

import random
from collections.abc import Iterator

import pytest

from testing.node.app import NAMESPACE, REDIS_SECRET, REDIS_URL, App
from tests.harness.operator.pods import hit, prompt

KEYS, PREFIX = "row-keys", "encrypted"
PROMPT = prompt(44)
MOUNTED = "/etc/lmcache/keys/remote"


@pytest.fixture(scope="module")
def app(make_app, installed) -> Iterator[App]:
    external = {"url": f"{REDIS_URL}?prefix={PREFIX}", "authSecretRef": {"name": REDIS_SECRET}}
    create_keys(installed)
    app = make_app("encrypted", remote={"external": external, "encryption": {"secretRef": {"name": KEYS}}})
    app.apply()
    yield app
    app.delete()


@pytest.fixture(scope="module")
def cold(app):
    """The answer without any cache. Afterwards its rows are in memory and in Redis."""
    pod = app.ready_pod()
    answer = pod.complete(PROMPT)
    pod.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 180)
    return answer


def key(version: int) -> str:
    return random.Random(version).randbytes(32).hex()


def create_keys(node) -> None:
    secret = {"metadata": {"name": KEYS}, "stringData": {"1": key(1)}}
    node.api.create("v1/secrets", secret, NAMESPACE)


def test_sidecar_encrypts_rows_with_the_key_of_the_secret(app, cold):
    assert app.ready_pod().stats()["remote"]["encryption"] == {"write_version": 1, "versions": [1]}
    assert app.wait_condition("RowsEncrypted")["reason"] == "Encrypted"


def test_new_pod_hits_rows_of_the_former_key(app, cold):
    before = app.ready_pod()
    app.node.api.patch("v1/secrets", KEYS, {"stringData": {"2": key(2)}}, NAMESPACE)
    app.node.wait(lambda: "2" in before.exec("sidecar", "ls", MOUNTED).split(), 300)
    assert app.ready_pod().uid == before.uid, "a changed Secret replaces no pod"
    app.node.api.delete("v1/pods", before.name, NAMESPACE)
    after = app.ready_pod(instead_of=before)
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] > 0
    assert after.stats()["remote"]["encryption"]["versions"] == [1, 2]


def test_pod_starts_without_the_secret_and_the_status_says_so(app, cold):
    before = app.ready_pod()
    app.node.api.delete("v1/secrets", KEYS, NAMESPACE)
    app.node.api.delete("v1/pods", before.name, NAMESPACE)
    after = app.ready_pod(instead_of=before)
    assert after.complete(PROMPT).tokens == cold.tokens
    condition = app.wait_condition("RowsEncrypted", "False")
    assert condition["reason"] == "EncryptionKeysInvalid"
    assert f"Secret {KEYS}: " in condition["message"]
    create_keys(app.node)
    app.wait_condition("RowsEncrypted")
    app.node.wait(lambda: after.stats()["remote"]["is_reachable"], 180)
    assert app.ready_pod().uid == after.uid
