"""The engine's pod on a real kubelet: the order of its containers, their rights, and their failures.

All tests share one pod, and each leaves it Ready.
"""

import contextlib
import subprocess
from functools import partial

import pytest

from testing.node import groups
from tests.harness.operator.pods import (
    is_in_service,
    is_ready,
    no_restart_between,
    prompt,
    stats_after_restart,
)

PYTHON = "/opt/lmcache/venv/bin/python"
HOG = "blocks = []\nwhile True: blocks.append(bytearray(b'x' * (32 << 20)))"


# ---- start ----


def test_sidecar_starts_first_and_blocks_no_other_container(tiny):
    pod = tiny.ready_pod()
    sidecar, payload, engine = (pod.container(name) for name in ("sidecar", "payload", "engine"))
    times = [
        sidecar["state"]["running"]["startedAt"],
        payload["state"]["terminated"]["startedAt"],
        payload["state"]["terminated"]["finishedAt"],
        engine["state"]["running"]["startedAt"],
    ]
    assert times == sorted(times)
    [spec] = [c for c in pod.object["spec"]["initContainers"] if c["name"] == "sidecar"]
    assert "startupProbe" not in spec
    assert "readinessProbe" not in spec


def test_containers_are_unprivileged_and_the_sidecars_root_is_read_only(tiny):
    pod = tiny.ready_pod()
    for name in ("engine", "sidecar"):
        status = dict(
            line.split(":\t", 1)
            for line in pod.exec(name, "cat", "/proc/1/status").splitlines()
            if ":\t" in line
        )
        assert set(status["Uid"].split()) == {"2000"}
        assert int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        with pytest.raises(subprocess.CalledProcessError):
            pod.exec(name, "ls", "/var/run/secrets/kubernetes.io/serviceaccount")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        pod.exec("sidecar", "touch", "/opt/lmcache/x")
    assert "Read-only file system" in refused.value.stderr


# ---- memory ----


def test_full_arena_is_within_the_memory_limit(tiny):
    before = tiny.ready_pod()
    for seed in range(100, 200):
        before.complete(prompt(seed, 8192), 1)
        memory = before.stats()["memory"]
        if memory["removed"]:
            break
    else:
        pytest.fail(f"the memory tier did not fill up: {memory}")
    after = tiny.ready_pod()
    assert no_restart_between(before, after)
    limit, peak = groups.memory_limit(after.group("sidecar")), groups.memory_peak(after.group("sidecar"))
    assert memory["size_bytes"] < peak < limit
    assert groups.num_oom_kills(after.group("sidecar")) == 0


def test_sidecar_killed_by_the_kernel_restarts_with_its_rows(tiny):
    before = tiny.ready_pod()
    question = prompt(1)
    cold = before.complete(question)
    stats_before = before.stats()
    with contextlib.suppress(subprocess.CalledProcessError):
        before.exec("sidecar", PYTHON, "-c", HOG)
    during = before.complete(prompt(2, 512))
    assert len(during.tokens) == 8

    def is_restarted():
        with contextlib.suppress(OSError):
            stats = tiny.pod().stats()
            return (
                stats["is_ready"]
                and stats["num_clients"]["attached"] == stats_before["num_clients"]["attached"]
            )

    tiny.node.wait(is_restarted, 180)
    after = tiny.ready_pod()
    # Version 2 of control groups kills all processes of the container, and removes its former group.
    assert not no_restart_between(before, after) or groups.num_oom_kills(after.group("sidecar")) > 0
    assert after.container("engine")["restartCount"] == before.container("engine")["restartCount"]
    after.reset_engine_cache()
    assert after.complete(question).tokens == cold.tokens


# ---- a sidecar that fails ----


def test_pod_stays_in_service_while_its_sidecar_crashes_repeatedly(tiny):
    before = tiny.ready_pod()
    pid = before.stats()["pid"]
    for _ in range(4):
        before.exec("sidecar", "sh", "-c", f"kill -SEGV {pid}")
        assert tiny.pod().is_ready
        assert is_in_service(tiny)
        pid = tiny.node.wait(partial(stats_after_restart, before, pid), 120)["pid"]
    tiny.node.wait(lambda: is_ready(before), 120)
    assert no_restart_between(before, tiny.ready_pod())
    assert "restarting it" in before.logs("sidecar")
    tiny.wait_condition("SidecarAttached")
