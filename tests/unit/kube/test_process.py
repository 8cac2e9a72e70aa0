"""Components of the control plane: their end is detected, they end with the test process, and waits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing import workers
from testing.child_process import ProcessDied
from testing.kube.api import ApiError, wait_for
from testing.kube.cluster import Cluster
from testing.kube.process import Component
from tools.kube import binaries


def test_unexpected_exit_is_reported_with_the_last_log_lines(tmp_path):
    component = Component("etcd", ["sh", "-c", "echo no space left >&2; exit 3"], tmp_path / "log")
    component.start()
    wait_for(lambda: not component.is_running)
    with pytest.raises(ProcessDied, match=r"etcd exited with 3:\nno space left"):
        component.check()


def test_stopped_component_is_no_failure_and_can_restart(tmp_path):
    component = Component("sleep", ["sleep", "60"], tmp_path / "log")
    component.start()
    component.stop()
    component.check()
    component.start()
    component.check()
    component.kill()


def test_component_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path):
    component = Component(
        "deaf", ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"], tmp_path / "log"
    )
    component.start()
    wait_for(lambda: "up" in component.log)
    assert component.terminate(timeout=0.2) == -9  # real time: the program never ends by itself


def test_component_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import pathlib; from testing.kube.process import Component\n"
        f"c = Component('sleep', ['sleep', '60'], pathlib.Path({str(tmp_path / 'log')!r})); c.start()\n"
        "print(c.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        # The parent-death signal is set only after setpriv has started the program.
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "sleep")
        parent.kill()

        def has_ended() -> bool:
            try:
                return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
            except FileNotFoundError:
                return True

        wait_for(has_ended)


def test_workers_have_no_port_in_common(monkeypatch):
    """Ports from 22,000 on are chosen by SGLang, and those from 32,768 on by the kernel."""
    ports: list[int] = []
    for number in range(16):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        ports += workers.ports()
    assert sorted(ports) == list(range(10_000, 22_000))


def test_controllers_are_started_again_and_an_ended_api_server_is_reported(tmp_path, monkeypatch):
    """A scheduler ends when its cache contradicts a restarted API server. A kubelet starts it again."""
    monkeypatch.setattr(binaries, "directory", lambda _: tmp_path)
    cluster = Cluster()
    ended = ["sh", "-c", "exit 1"]
    for name in ("kube-apiserver", "kube-scheduler"):
        cluster.components[name] = Component(name, ["sleep", "60"], tmp_path / name)
        cluster.components[name].start()
    try:
        scheduler = cluster.components["kube-scheduler"]
        first = scheduler.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not scheduler.is_running)
        cluster.check()
        assert scheduler.is_running
        assert scheduler.pid != first
        scheduler.argv = ended
        os.kill(scheduler.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="kube-scheduler exited with 1"):
            wait_for(cluster.check)
        scheduler.wait()
        os.kill(cluster.components["kube-apiserver"].pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="kube-apiserver"):
            wait_for(cluster.check)
        cluster.components["kube-apiserver"].wait()
    finally:
        cluster.stop()


def test_wait_repeats_what_is_missing_and_raises_what_is_refused():
    answers = iter([ApiError(404, "none"), ApiError(503, "busy"), ConnectionRefusedError(), "", "ready"])

    def condition() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, str)
        return answer

    assert wait_for(condition) == "ready"
    answers = iter([ApiError(403, "forbidden")])
    with pytest.raises(ApiError, match="forbidden"):
        wait_for(condition)
    answers = iter(["", "", ""])
    with pytest.raises(TimeoutError, match="last: ''"):
        wait_for(condition, 0)
