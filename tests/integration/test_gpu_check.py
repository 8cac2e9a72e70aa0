"""``make gpu-check`` on the simulated driver: all of its steps, and what it says if something is missing."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.gpu import shared_files
from testing import cuda
from testing.child_process import REPOSITORY, wait_until
from testing.deadlines import CALLS

DEADLINES = CALLS
FILES = {"gpu-facts.md", "logs.tgz", "results.jsonl", "summary.txt"}
LIGHT_STEPS = ["facts", "bench", "library", "blend", "arena"]


def check(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--folder", str(folder), *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("is_simulated", [False, True])
def test_missing_gpu_is_reported_and_no_file_is_written(tmp_path, is_simulated):
    folder = tmp_path / "results"
    with cuda.node() as node:
        environment = node.environment() if is_simulated else {"CUDA_VISIBLE_DEVICES": ""}
        completed = check(folder, **environment)
    assert completed.returncode == 2
    assert ("no GPU here: the simulated driver" if is_simulated else "no GPU here") in completed.stderr
    assert not folder.exists()


def test_every_step_that_needs_no_engine_passes_and_is_on_the_page(tmp_path):
    with cuda.node() as node:
        completed = check(tmp_path, "--simulated", *LIGHT_STEPS, **node.environment())
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert completed.stdout.splitlines()[-1] == "gpu-check: passed"
        assert node.processes() == []
    assert {path.name for path in tmp_path.iterdir()} == FILES
    text = (tmp_path / "gpu-facts.md").read_text()
    assert "no figure here means anything" in text
    impossible = [line for line in text.splitlines() if "not possible here" in line]
    assert len(impossible) <= 1, "only another user can't use the simulated driver"
    for row in (
        "memory opened: own PID, IPC and mount namespace",
        "memory opened: after the exporter was killed",
        "a batch of copies from memory that is not pinned | error 1 | right bytes or an error",
        "28 KiB",
        "not pinned",
        "stores by the sidecar, pieces of 2 MiB",
        "loads by the engine",
        "a second process's context",
        "cpu | 256",
        "AllTokens",
        "pinning by another process",
    ):
        assert f"| {row}" in text, row


def test_tests_that_skip_on_a_real_driver_leave_nothing_behind(tmp_path):
    """The tests take the simulated driver for a real one, and skip what needs orders to it.

    They share it with tests of other workers, so an order or a counter would concern those, too.
    """
    with cuda.node() as node:
        completed = check(tmp_path, "--simulated", "tests", **node.environment())
        assert not (node.path / "orders").exists(), "a test gave orders to the driver"
    assert completed.returncode == 0, completed.stdout


def test_killed_arena_step_leaves_nothing_in_shared_memory(tmp_path):
    with cuda.node() as node:
        argv = [sys.executable, "-m", "benchmarks.gpu.run_step", "arena", str(tmp_path), "100", "--tiny"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(argv, cwd=REPOSITORY, env=os.environ | node.environment(), stdout=log)
            pattern = f"{shared_files.prefix(tmp_path)}*"
            wait_until(lambda: [*shared_files.FOLDER.glob(pattern)], what="the arena has a file")
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        assert [*shared_files.FOLDER.glob(pattern)] == []
        assert node.processes() == []


def test_after_a_failure_the_rest_is_measured_and_the_last_line_says_what_it_means(tmp_path):
    with cuda.node() as node:
        environment = node.environment(orders="fail cuIpcOpenMemHandle_v2 * 1")
        completed = check(tmp_path, "--simulated", "facts", "arena", **environment)
    assert completed.returncode == 1
    last_line = completed.stdout.splitlines()[-1]
    assert last_line.startswith("gpu-check: 1 of 2 steps failed: facts (memory opened: another process")
    assert "use --transfer SharedMemory" in last_line
    assert (tmp_path / "summary.txt").read_text() == last_line + "\n"
    text = (tmp_path / "gpu-facts.md").read_text()
    assert "another process | error 1 | its bytes |" in text
    assert "| pinning by another process" in text
