"""The cache in pods, as a user of the chart has it: cold, and hits from each place that keeps KV.

The tests follow one another: each begins where the one before it left the pod.
"""

from __future__ import annotations

import contextlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.child_process import REPOSITORY
from testing.node import groups
from testing.node.app import PASSWORD, REDIS_NAMESPACE
from testing.node.pods import Pod
from tests.harness.pods import endings, hit, is_going, kept, least_cached, num_running, prompt

PROMPT, LATE_PROMPT = prompt(7), prompt(41, 2048)
NUM_TOKENS = 600
PYTHON = str(REPOSITORY / ".venv/bin/python")
# The kernel ends the largest process, which is the engine's and none of these.
CROWD = """
import os, time
for _ in range(64):
    if not os.fork():
        held = b"x" * (128 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
"""


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


def test_hit_after_the_kernel_killed_the_engine(tiny, cold):
    before = tiny.ready_pod()
    restarts = before.container("engine")["restartCount"]
    with contextlib.suppress(subprocess.CalledProcessError):  # it ends with the container
        before.exec("engine", PYTHON, "-c", CROWD)
    tiny.node.wait(lambda: tiny.pod().container("engine")["restartCount"] > restarts, 300)
    after = tiny.ready_pod()
    assert after.uid == before.uid
    assert after.container("engine")["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert after.container("sidecar")["containerID"] == before.container("sidecar")["containerID"]
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] == 0  # it was all in memory
    tiny.node.wait(lambda: tiny.conditions()["Degraded"]["reason"] == "OOMKilled")
    assert "container engine" in tiny.conditions()["Degraded"]["message"]


def num_rows_in(redis) -> int:
    """Of all prompts; each row is an object of its own."""
    return int(redis.exec("redis", "redis-cli", "--no-auth-warning", "-a", PASSWORD, "DBSIZE"))


def test_a_rolled_pod_ends_its_request_and_leaves_its_rows_to_the_next(tiny, cold):
    """Redis hangs until the engine has ended: what is to be written waits in a sidecar that has to go."""
    node, before = tiny.node, tiny.ready_pod()
    redis = Pod(node, node.api.get("v1/pods", "kv", REDIS_NAMESPACE))
    engine, num_written = before.group("engine"), num_rows_in(redis)
    with kept(before), ThreadPoolExecutor(1) as threads:
        with redis.stopped("redis"):
            late = before.complete(LATE_PROMPT)
            node.wait(lambda: before.stats()["num_unwritten_rows"] >= least_cached(LATE_PROMPT) // 256)
            asked = threads.submit(before.complete, prompt(42, 64), NUM_TOKENS)
            node.wait(lambda: num_running(before))
            roll_during(tiny, before, asked)
            assert len(asked.result().tokens) == NUM_TOKENS
            node.wait(lambda: groups.is_empty(engine), 180)
        ended = node.wait(lambda: endings(tiny.pod()), 180)
    assert [container["exitCode"] for container in ended] == [0, 0]
    assert num_rows_in(redis) >= num_written + least_cached(LATE_PROMPT) // 256
    after = tiny.ready_pod(instead_of=before)
    assert "ROLLED=1" in after.exec("engine", "env").splitlines()
    assert after.stats()["memory"]["used_rows"] == 0
    hit(after, PROMPT, cold)
    hit(after, LATE_PROMPT, late)
    # Not of all rows: where a busy machine made Redis slow, the engine rather computes them again.
    assert after.stats()["remote"]["hits"] > 0
    tiny.wait_condition("Ready")


def roll_during(app, pod, asked) -> None:
    """Declare something else; until the operator has the pod replaced, with that request still running."""
    with pod.stopped("engine"):
        [engine] = app.spec["spec"]["engine"]["podTemplate"]["spec"]["containers"]
        engine["env"].append({"name": "ROLLED", "value": "1"})
        app.apply()
        app.node.wait(lambda: is_going(app.pod()), 60)
        assert not asked.done()
