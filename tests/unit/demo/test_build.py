"""The background build of the demo: all its processes pause together, and none is left stopped."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import build
from demo.build import Build, members
from testing.child_process import REPOSITORY, wait_until

COMPILERS = ["sh", "-c", "sleep 300 | sleep 300"]
"""A parent and two children, like ``go`` with its compilers."""
STUBBORN = ["sh", "-c", "trap '' INT; echo ready; while :; do sleep 300; done"]
NUM_PROCESSES = 3


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def started(log) -> Iterator[Build]:
    with Build.start(COMPILERS, log) as running:
        wait_until(lambda: len(members(running.pid)) == NUM_PROCESSES)
        yield running


def states(running: Build) -> set[str]:
    return set(members(running.pid).values())


def is_running(running: Build) -> bool:
    return len(members(running.pid)) == NUM_PROCESSES and not states(running) & {"T", "Z"}


def test_paused_stops_all_processes_within_its_block(started):
    for _ in range(3):
        with started.paused():
            assert states(started) == {"T"}
        wait_until(lambda: is_running(started))


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_processes_continue_after_an_exception(started, error):
    with pytest.raises(error), started.paused():
        raise error
    wait_until(lambda: is_running(started))


def test_finished_build_has_nothing_to_pause(log):
    with Build.start(["sh", "-c", "echo '[kube] done in 3 s'; exit 3"], log) as finished:
        assert finished.is_over(60)
        with finished.paused():
            pass
    assert (finished.status, finished.log, finished.progress()) == (3, "[kube] done in 3 s\n", "")
    assert not Path(f"/proc/{finished.pid}").exists()
    assert not Path(f"/proc/{finished._watcher}").exists()


def test_close_ends_the_build(started):
    started.close()
    assert (members(started.pid), started.status) == ({}, -signal.SIGINT)
    started.close()


def test_build_that_ignores_sigint_is_killed(log, monkeypatch):
    monkeypatch.setattr(build, "_GRACE_SECONDS", 0.1)
    with Build.start(STUBBORN, log) as running:
        wait_until(lambda: running.log)
    wait_until(lambda: not members(running.pid))
    assert running.status == -signal.SIGKILL


@pytest.mark.parametrize("block", ["started.paused()", "nullcontext()"], ids=["paused", "running"])
def test_killed_demo_leaves_no_build(tmp_path, block):
    script = f"""
import sys
from contextlib import nullcontext
from pathlib import Path
from demo.build import Build
with Build.start({COMPILERS!r}, Path({str(tmp_path / "log")!r})) as started, {block}:
    print(started.pid, flush=True)
    sys.stdin.read()
"""
    argv, pipe = [sys.executable, "-c", script], subprocess.PIPE
    demo = subprocess.Popen(argv, cwd=REPOSITORY, stdin=pipe, stdout=pipe)
    with demo:
        group = int(demo.stdout.readline())
        assert members(group)
        demo.kill()
    wait_until(lambda: not members(group))


def test_process_after_exec_adopts_the_build(tmp_path):
    start_script = f"""
import os, sys
from pathlib import Path
from demo.build import Build
started = Build.start({COMPILERS!r}, Path("{tmp_path}/log"))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], started.handle])
"""
    continue_script = f"""
import sys
from pathlib import Path
from demo.build import Build, members
with Build.adopt(sys.argv[1], Path("{tmp_path}/log")) as started:
    with started.paused():
        print(set(members(started.pid).values()))
print(members(started.pid), started.status)
"""
    argv = [sys.executable, "-c", start_script, continue_script]
    completed = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert completed.stdout == f"{{'T'}}\n{{}} {-signal.SIGINT}\n"
