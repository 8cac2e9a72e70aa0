"""The cache in pods, as a user of the chart has it: a cold request, and hits in each tier.

The tests depend on their order: each continues with the pod as the previous test left it.
"""

import contextlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.child_process import REPOSITORY
from testing.node import groups
from testing.node.app import PASSWORD, REDIS_NAMESPACE, UPSTREAM_FOLDER
from testing.node.pods import Pod
from tests.harness.operator.pods import (
    hit,
    is_terminating,
    least_cached,
    prompt,
    retained,
    termination_states,
)

PROMPT, LATE_PROMPT = prompt(7), prompt(41, 2048)
NUM_TOKENS = 300  # of a request that runs while its pod is replaced
PYTHON = str(REPOSITORY / ".venv/bin/python")
# The kernel kills the largest process. That is the engine, and none of these.
CROWD = """
import os, time
for _ in range(64):
    if not os.fork():
        memory = b"x" * (128 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def cold(tiny):
    """The answer without any cache. Afterwards its rows are in memory and in Redis."""
    pod = tiny.ready_pod()
    pod.complete(PROMPT[::-1], 2)  # warms the engine up, so that no measured time includes it
    answer = pod.complete(PROMPT)
    tiny.node.reached("first answer")
    tiny.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    return answer


def test_second_request_hits_in_memory(tiny, cold):
    assert cold.num_cached == 0
    hit(tiny.ready_pod(), PROMPT, cold)
    tiny.node.reached("first hit")


def test_engine_can_import_upstreams_package_and_the_connector(tiny, cold):
    code = (
        f"import sys; sys.path.append('{UPSTREAM_FOLDER}')\n"
        "import lmcache.v1, lmcache_client.vllm.connector\n"
        "import lmcache.integration.vllm.vllm_multi_process_adapter\n"
        "print(lmcache.__file__, lmcache_client.__file__)"
    )
    printed = tiny.ready_pod().exec("engine", "env", "LMCACHE_TRACK_USAGE=false", PYTHON, "-c", code)
    theirs, ours = printed.split()[-2:]
    assert theirs == f"{UPSTREAM_FOLDER}/lmcache/__init__.py"
    assert ours == "/opt/lmcache/client/lmcache_client/__init__.py"


def test_restarted_engine_hits_after_an_oom_kill(tiny, cold):
    before = tiny.ready_pod()
    restarts = before.container("engine")["restartCount"]
    with contextlib.suppress(subprocess.CalledProcessError):  # the command ends with the container
        before.exec("engine", PYTHON, "-c", CROWD)
    tiny.node.wait(lambda: tiny.pod().container("engine")["restartCount"] > restarts, 300)
    after = tiny.ready_pod()
    assert after.uid == before.uid
    assert after.container("engine")["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert after.container("sidecar")["containerID"] == before.container("sidecar")["containerID"]
    hit(after, PROMPT, cold)
    assert after.stats()["remote"]["hits"] == 0  # all rows were in memory
    tiny.node.wait(lambda: tiny.conditions()["Degraded"]["reason"] == "OOMKilled")
    assert "container engine" in tiny.conditions()["Degraded"]["message"]


def num_rows_in(redis) -> int:
    """Number of rows of all prompts. Each row is one object."""
    return int(redis.exec("redis", "redis-cli", "--no-auth-warning", "-a", PASSWORD, "DBSIZE"))


def test_rolled_pod_finishes_its_request_and_writes_its_rows_through(tiny, cold):
    """Redis hangs until the engine has ended, so that rows wait in a sidecar that must terminate."""
    node, before = tiny.node, tiny.ready_pod()
    redis = Pod(node, node.api.get("v1/pods", "kv", REDIS_NAMESPACE))
    engine, num_written = before.group("engine"), num_rows_in(redis)
    with retained(before), ThreadPoolExecutor(1) as threads:
        with redis.stopped("redis"):
            late = before.complete(LATE_PROMPT)
            node.wait(lambda: before.stats()["num_unwritten_rows"] >= least_cached(LATE_PROMPT) // 256)
            with before.stopped_during(threads, prompt(42, 64), NUM_TOKENS) as request:
                roll(tiny)
                assert not request.done()
            assert len(request.result().tokens) == NUM_TOKENS
            node.wait(lambda: groups.is_empty(engine), 180)
        ended = node.wait(lambda: termination_states(tiny.pod()), 180)
    assert [container["exitCode"] for container in ended] == [0, 0]
    assert num_rows_in(redis) >= num_written + least_cached(LATE_PROMPT) // 256
    after = tiny.ready_pod(instead_of=before)
    assert "ROLLED=1" in after.exec("engine", "env").splitlines()
    assert after.stats()["memory"]["used_rows"] == 0
    hit(after, PROMPT, cold)
    hit(after, LATE_PROMPT, late)
    # Not all rows need to hit: if Redis is slow on a busy machine, the engine computes them again.
    assert after.stats()["remote"]["hits"] > 0
    tiny.wait_condition("Ready")


def roll(app) -> None:
    """Change the spec, and wait until the operator evicts the pod."""
    [engine] = app.spec["spec"]["engine"]["podTemplate"]["spec"]["containers"]
    engine["env"].append({"name": "ROLLED", "value": "1"})
    app.apply()
    app.node.wait(lambda: is_terminating(app.pod()), 60)
