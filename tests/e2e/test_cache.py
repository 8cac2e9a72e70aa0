"""The cache in pods, as a user of the chart has it: cold, and hits from each place that keeps KV.

The tests follow one another: each begins where the one before it left the pod.
"""

from __future__ import annotations

import pytest

from tests.harness.pods import hit, least_cached, prompt

PROMPT = prompt(7)


@pytest.fixture(scope="module")
def cold(tiny):
    """The answer without any cache, after which all of it is in memory and in Redis."""
    pod = tiny.ready_pod()
    pod.complete(PROMPT[::-1], 2)  # what an engine does once is in nobody's time
    answer = pod.complete(PROMPT)
    tiny.node.reached("first answer")
    tiny.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    return answer


def test_hit_from_memory(tiny, cold):
    assert cold.num_cached == 0
    hit(tiny.ready_pod(), PROMPT, cold)
    tiny.node.reached("first hit")


def test_hit_after_the_engine_was_killed(tiny, cold):
    before = tiny.ready_pod()
    restarts = before.container("engine")["restartCount"]
    before.kill("engine")
    tiny.node.wait(lambda: tiny.pod().container("engine")["restartCount"] > restarts, 120)
    after = tiny.ready_pod()
    assert after.uid == before.uid
    assert after.container("sidecar")["containerID"] == before.container("sidecar")["containerID"]
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] == 0  # it was all in memory


def test_hit_from_redis_in_a_new_pod(tiny, cold):
    before = tiny.ready_pod()
    tiny.node.api.delete("v1/pods", before.name, before.namespace)
    after = tiny.ready_pod(instead_of=before)
    assert after.stats()["memory"]["used_rows"] == 0
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] >= least_cached(PROMPT) // 256
    tiny.wait_condition("Ready")
