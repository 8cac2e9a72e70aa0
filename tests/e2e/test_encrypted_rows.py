"""Rows that sidecars encrypt, on a real kubelet: contents of Redis, rotation of keys, a deleted Secret.

The tests depend on their order, and share one LMCacheCluster.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.node.app import NAMESPACE, PASSWORD, REDIS_NAMESPACE, REDIS_SECRET, REDIS_URL, App
from testing.node.pods import Pod
from tests.harness.operator.pods import hit, prompt

KEYS, PREFIX = "row-keys", "encrypted"
PROMPT = prompt(44)
ARENA, MOUNTED = "var/lib/lmcache/arena", "etc/lmcache/keys/remote"
SAMPLE_BYTES, NUM_SAMPLES, STRIDE = 32, 24, 64 << 10
# Counts the samples, in hexadecimal, that occur in any value under a prefix. The output is "matches/values".
SEARCH = """
local samples, values, matches = {}, {}, 0
for number, hex in ipairs(ARGV) do
  samples[number] = hex:gsub('..', function(digits) return string.char(tonumber(digits, 16)) end)
end
for _, name in ipairs(redis.call('KEYS', KEYS[1] .. ':*')) do
  for _, value in ipairs(redis.call('HVALS', name)) do values[#values + 1] = value end
end
for _, sample in ipairs(samples) do
  for _, value in ipairs(values) do
    if value:find(sample, 1, true) then matches = matches + 1 break end
  end
end
return matches .. '/' .. #values
"""


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
    return computed(app.ready_pod(), PROMPT)


def key(version: int) -> str:
    return random.Random(version).randbytes(32).hex()


def create_keys(node) -> None:
    secret = {"metadata": {"name": KEYS}, "stringData": {"1": key(1)}}
    node.api.create("v1/secrets", secret, NAMESPACE)


def computed(pod: Pod, question: list[int]):
    """The answer of a pod, whose sidecar has then written all rows."""
    answer = pod.complete(question)
    pod.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 180)
    return answer


def files_of(pod: Pod) -> Path:
    """The file system of the sidecar's container. The tests run on the node."""
    process = (pod.group("sidecar") / "cgroup.procs").read_text().split()[0]
    return Path(f"/proc/{process}/root")


def samples(pod: Pod) -> list[str]:
    """Pieces of KV from the pod's memory tier, in hexadecimal."""
    pieces: list[str] = []
    with (files_of(pod) / ARENA).open("rb") as arena:
        # The first MiB has tables. Rows with the same byte often are padding.
        for position in range(1 << 20, os.fstat(arena.fileno()).st_size, STRIDE):
            piece = os.pread(arena.fileno(), SAMPLE_BYTES, position)
            if len(set(piece)) > SAMPLE_BYTES // 2:
                pieces.append(piece.hex())
    assert len(pieces) >= NUM_SAMPLES
    return random.Random(5).sample(pieces, NUM_SAMPLES)


def matches(pod: Pod, prefix: str) -> tuple[int, int]:
    """Number of samples of a pod's KV that are in Redis, and the number of values under the prefix there."""
    redis = Pod(pod.node, pod.node.api.get("v1/pods", "kv", REDIS_NAMESPACE))
    command = ["redis-cli", "--no-auth-warning", "-a", PASSWORD, "EVAL", SEARCH, "1", prefix, *samples(pod)]
    num_matches, _, num_values = redis.exec("redis", *command).strip().strip('"').partition("/")
    return int(num_matches), int(num_values)


def test_redis_has_no_kv_of_pods_that_encrypt(app, tiny, cold):
    computed(tiny.ready_pod(), prompt(45))
    num_plain, _ = matches(tiny.ready_pod(), "lmc1")
    assert num_plain > 0, "without encryption, the search finds KV"
    num_readable, num_values = matches(app.ready_pod(), PREFIX)
    assert num_values >= len(PROMPT) // 256
    assert num_readable == 0
    assert app.wait_condition("RowsEncrypted")["reason"] == "Encrypted"


def test_new_pod_hits_rows_of_the_former_key(app, cold):
    before = app.ready_pod()
    app.node.api.patch("v1/secrets", KEYS, {"stringData": {"2": key(2)}}, NAMESPACE)
    app.node.wait(lambda: (files_of(before) / MOUNTED / "2").exists(), 300)
    assert app.ready_pod().uid == before.uid, "a changed Secret replaces no pod"
    app.node.api.delete("v1/pods", before.name, NAMESPACE)
    after = app.ready_pod(instead_of=before)
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] > 0
    computed(after, prompt(46))
    assert matches(after, PREFIX)[0] == 0


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
