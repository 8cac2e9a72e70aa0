"""Components of the control plane: their end is detected, they end with the test process, and waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing import workers
from testing.child_process import ProcessDied
from testing.kube.api import wait_for
from testing.kube.process import Component


def test_unexpected_exit_is_reported_with_the_last_log_lines(tmp_path):
    component = Component("etcd", ["sh", "-c", "echo no space left >&2; exit 3"], tmp_path / "log")
    component.start()
    wait_for(lambda: not component.is_running)
    with pytest.raises(ProcessDied, match=r"etcd exited with 3:\nno space left"):
        component.check()


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
    """Ports from 22,000 on are chosen by SGLang, and those from 32,768 on by the kernel.

    The second data-parallel rank of an engine takes the next port.
    """
    ports: list[int] = []
    for number in range(16):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        ports += (port + rank for port in workers.ports() for rank in range(2))
    assert sorted(ports) == list(range(10_000, 22_000))


def test_ranks_get_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 3})
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert (workers.core(), workers.cores(3)) == (9, [9, 3, 9])
