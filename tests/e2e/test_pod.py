"""What a kubelet makes of the engine's pod: the order of its containers, their rights, and their ends.

One pod for all; each test leaves it Ready.
"""

from __future__ import annotations

import contextlib
import subprocess
from functools import partial

import pytest

from testing.kube.api import ApiError
from testing.node import groups
from testing.node.app import NAMESPACE
from tests.harness.pods import is_in_service, is_ready, no_restart_between, prompt, started_again

PYTHON = "/opt/lmcache/venv/bin/python"
HOG = "held = []\nwhile True: held.append(bytearray(b'x' * (32 << 20)))"


# ---- as it starts ----


def test_the_sidecar_runs_first_and_nothing_waits_for_it(tiny):
    pod = tiny.ready_pod()
    sidecar, payload, engine = (pod.container(name) for name in ("sidecar", "payload", "engine"))
    began = [
        sidecar["state"]["running"]["startedAt"],
        payload["state"]["terminated"]["startedAt"],
        payload["state"]["terminated"]["finishedAt"],
        engine["state"]["running"]["startedAt"],
    ]
    assert began == sorted(began)
    [spec] = [c for c in pod.object["spec"]["initContainers"] if c["name"] == "sidecar"]
    assert "startupProbe" not in spec
    assert "readinessProbe" not in spec


def test_containers_have_no_rights_and_the_sidecar_no_root_to_write_to(tiny):
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


def test_the_namespace_refuses_pods_with_more_rights(tiny, references):
    container = {"name": "c", "image": references["pause"], "securityContext": {"privileged": True}}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        tiny.node.api.create(
            "v1/pods", {"metadata": {"name": "x"}, "spec": {"containers": [container]}}, NAMESPACE
        )


# ---- memory ----


def test_a_full_arena_is_within_the_limit(tiny):
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


def test_a_sidecar_that_the_kernel_kills_comes_back_with_its_rows(tiny):
    before = tiny.ready_pod()
    question = prompt(1)
    cold = before.complete(question)
    first = before.stats()
    with contextlib.suppress(subprocess.CalledProcessError):
        before.exec("sidecar", PYTHON, "-c", HOG)
    during = before.complete(prompt(2, 512))
    assert len(during.tokens) == 8

    def is_back():
        with contextlib.suppress(OSError):
            now = tiny.pod().stats()
            return now["is_ready"] and now["num_clients"]["attached"] == first["num_clients"]["attached"]

    tiny.node.wait(is_back, 180)
    after = tiny.ready_pod()
    # On version 2 of control groups all of the container was killed, and its former group is gone.
    assert not no_restart_between(before, after) or groups.num_oom_kills(after.group("sidecar")) > 0
    assert after.container("engine")["restartCount"] == before.container("engine")["restartCount"]
    after.reset_engine_cache()
    assert after.complete(question).tokens == cold.tokens


# ---- a sidecar that fails ----


def test_a_sidecar_that_crashes_again_and_again_leaves_the_pod_in_service(tiny):
    before = tiny.ready_pod()
    pid = before.stats()["pid"]
    for _ in range(4):
        before.exec("sidecar", "sh", "-c", f"kill -SEGV {pid}")
        assert tiny.pod().is_ready
        assert is_in_service(tiny)
        pid = tiny.node.wait(partial(started_again, before, pid), 120)["pid"]
    tiny.node.wait(lambda: is_ready(before), 120)
    assert no_restart_between(before, tiny.ready_pod())
    assert "starting it again" in before.logs("sidecar")
    tiny.wait_condition("SidecarAttached")
