"""The build beside the demo: it pauses as a whole, and never stays behind stopped."""

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
"""A parent and two children, as ``go`` with its compilers."""
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


def runs(running: Build) -> bool:
    return len(members(running.pid)) == NUM_PROCESSES and not states(running) & {"T", "Z"}


def test_all_processes_are_stopped_for_the_block_and_continue_after_it(started):
    for _ in range(3):
        with started.paused():
            assert states(started) == {"T"}
        wait_until(lambda: runs(started))


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_they_continue_after_an_exception_too(started, error):
    with pytest.raises(error), started.paused():
        raise error
    wait_until(lambda: runs(started))


def test_a_build_that_is_over_has_nothing_to_pause(log):
    with Build.start(["sh", "-c", "echo '[kube] done in 3 s'; exit 3"], log) as over:
        assert over.is_over(60)
        with over.paused():
            pass
    assert over.status == 3
    assert over.log == "[kube] done in 3 s\n"
    assert over.progress() == ""
    assert not Path(f"/proc/{over.pid}").exists()
    assert not Path(f"/proc/{over._watcher}").exists()


def test_its_last_line_is_its_progress(log):
    with Build.start(
        ["sh", "-c", "echo one; echo '[kube] 20 s, 7 packages'; exec sleep 300"], log
    ) as running:
        wait_until(lambda: "packages" in running.log)
        assert running.progress().endswith(": 20 s, 7 packages")


def test_the_end_of_the_demo_ends_it(started):
    started.close()
    assert members(started.pid) == {}
    assert started.status == -signal.SIGINT
    started.close()


def test_it_ends_while_it_is_paused(started):
    with started.paused():
        started.close()
    assert members(started.pid) == {}


def test_a_build_that_ignores_the_interrupt_is_killed(log, monkeypatch):
    monkeypatch.setattr(build, "_GRACE_SECONDS", 0.1)
    with Build.start(STUBBORN, log) as running:
        wait_until(lambda: running.log)
    wait_until(lambda: not members(running.pid))
    assert running.status == -signal.SIGKILL


@pytest.mark.parametrize("block", ["started.paused()", "nullcontext()"], ids=["paused", "running"])
def test_a_killed_demo_leaves_no_build(tmp_path, block):
    script = f"""
import sys
from contextlib import nullcontext
from pathlib import Path
from demo.build import Build
with Build.start({COMPILERS!r}, Path({str(tmp_path / "log")!r})) as started, {block}:
    print(started.pid, flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    demo = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, **pipes)
    with demo:
        group = int(demo.stdout.readline())
        assert members(group)
        demo.kill()
    wait_until(lambda: not members(group))


def test_the_process_after_an_exec_adopts_it(tmp_path):
    start = f"""
import os, sys
from pathlib import Path
from demo.build import Build
started = Build.start({COMPILERS!r}, Path("{tmp_path}/log"))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], started.handle])
"""
    go_on = f"""
import sys
from pathlib import Path
from demo.build import Build, members
with Build.adopt(sys.argv[1], Path("{tmp_path}/log")) as started:
    with started.paused():
        print(set(members(started.pid).values()))
print(members(started.pid), started.status)
"""
    argv = [sys.executable, "-c", start, go_on]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == f"{{'T'}}\n{{}} {-signal.SIGINT}\n"
