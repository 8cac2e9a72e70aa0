"""The cache in pods, as a user of the chart has it: cold, and hits from each place that keeps KV.

The tests follow one another: each begins where the one before it left the pod.
"""

from __future__ import annotations

import random

import pytest

PROMPT = [token + 4 for token in random.Random(7).choices(range(256), k=4096)]
LEAST_CACHED = 15 * 256
"""All chunks but the last, of which an engine computes at least the last token anew."""


@pytest.fixture(scope="module")
def cold(tiny):
    """The answer without any cache, after which all of it is in memory and in Redis."""
    pod = tiny.ready_pod()
    pod.complete(PROMPT[::-1], 2)  # what an engine does once is in nobody's time
    answer = pod.complete(PROMPT)
    tiny.node.reached("first answer")
    tiny.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    return answer


def hit(pod, cold):
    """The first answer whose prompt was cached whole, as from a user who asks again; all are the same.

    What a lower tier has comes while the request waits for it, as long as that is worth it; a machine that
    is busy brings the rest for the next one.
    """

    def ask():
        answer = pod.complete(PROMPT)
        pod.reset_engine_cache()
        assert answer.tokens == cold.tokens
        return answer if answer.num_cached >= LEAST_CACHED else None

    pod.reset_engine_cache()
    return pod.node.wait(ask, 180)


def test_hit_from_memory(tiny, cold):
    assert cold.num_cached == 0
    hit(tiny.ready_pod(), cold)
    tiny.node.reached("first hit")


def test_hit_after_the_engine_was_killed(tiny, cold):
    before = tiny.ready_pod()
    restarts = before.container("engine")["restartCount"]
    before.kill("engine")
    tiny.node.wait(lambda: tiny.pod().container("engine")["restartCount"] > restarts, 120)
    after = tiny.ready_pod()
    assert after.uid == before.uid
    assert after.container("sidecar")["containerID"] == before.container("sidecar")["containerID"]
    hit(after, cold)
    assert after.stats()["remote"]["hits"] == 0  # it was all in memory


def test_hit_from_redis_in_a_new_pod(tiny, cold):
    before = tiny.ready_pod()
    tiny.node.api.delete("v1/pods", before.name, before.namespace)
    after = tiny.ready_pod(instead_of=before)
    assert after.stats()["memory"]["used_rows"] == 0
    hit(after, cold)
    assert after.stats()["remote"]["hits"] >= LEAST_CACHED // 256
    tiny.wait_condition("Ready")
