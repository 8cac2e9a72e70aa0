"""A node that loses power under engine, sidecar, Redis and operator at once."""

from __future__ import annotations

import random

from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import READY_SECONDS

PROMPT = [token + 4 for token in random.Random(13).choices(range(256), k=2048)]


def num_restarts(pod):
    return sum(pod.container(name)["restartCount"] for name in ("engine", "sidecar"))


def test_the_engine_serves_and_is_cached_again(tiny):
    before = tiny.ready_pod()
    cold = before.complete(PROMPT)
    tiny.node.reboot()

    def is_back():
        pod = tiny.pod()
        return pod if pod.is_ready and num_restarts(pod) >= num_restarts(before) + 2 else None

    after = tiny.node.wait(is_back, READY_SECONDS)
    assert after.uid == before.uid
    # What was in memory is gone, the sidecar's and that of this Redis, and nothing false came instead.
    assert after.complete(PROMPT).tokens == cold.tokens
    tiny.node.wait(lambda: after.stats()["num_unwritten_rows"] == 0, 120)
    after.reset_engine_cache()
    warm = after.complete(PROMPT)
    assert warm.tokens == cold.tokens
    assert warm.num_cached > 0
    for operator in tiny.node.api.objects("v1/pods", SYSTEM_NAMESPACE):
        assert operator["status"]["containerStatuses"][0]["restartCount"] >= 1
    tiny.wait_condition("Ready")
