"""A node that loses power while engine, sidecar, Redis and operator run."""

import random

from testing.kube.operator import SYSTEM_NAMESPACE
from testing.node.app import READY_SECONDS

PROMPT = [token + 4 for token in random.Random(13).choices(range(256), k=2048)]


def num_restarts(pod):
    return sum(pod.container(name)["restartCount"] for name in ("engine", "sidecar"))


def test_engine_serves_and_hits_again_after_a_power_cut(tiny):
    before = tiny.ready_pod()
    cold = before.complete(PROMPT)
    tiny.node.reboot()

    def is_restarted():
        pod = tiny.pod()
        return pod if pod.is_ready and num_restarts(pod) >= num_restarts(before) + 2 else None

    after = tiny.node.wait(is_restarted, READY_SECONDS)
    assert after.uid == before.uid
    # The memory of the sidecar and of Redis is lost. No wrong KV may be loaded instead.
    assert after.complete(PROMPT).tokens == cold.tokens
    tiny.node.wait(lambda: after.stats()["num_unwritten_rows"] == 0, 120)
    after.reset_engine_cache()
    warm = after.complete(PROMPT)
    assert warm.tokens == cold.tokens
    assert warm.num_cached > 0
    for operator in tiny.node.api.objects("v1/pods", SYSTEM_NAMESPACE):
        assert operator["status"]["containerStatuses"][0]["restartCount"] >= 1
    tiny.wait_condition("Ready")
