"""``make gpu-check`` says so where there is no GPU, and works where there is a driver."""

from __future__ import annotations

import os
import subprocess
import sys

from testing import cuda
from testing.child_process import REPOSITORY


def check(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    report = tmp_path / "facts.md"
    done = check("--output", report, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert not report.exists()


def test_the_simulated_driver_is_no_gpu(tmp_path):
    report = tmp_path / "facts.md"
    with cuda.node() as node:
        done = check("--output", report, **node.environment())
    assert done.returncode == 2
    assert "no GPU here: the simulated driver" in done.stderr
    assert not report.exists()


def test_every_part_of_the_check_runs(tmp_path):
    report = tmp_path / "facts.md"
    with cuda.node() as node:
        done = check("--output", report, "--simulated", "--no-tests", **node.environment())
        assert done.returncode == 0, done.stderr
        assert node.processes() == []
    text = report.read_text()
    assert "no figure here means anything" in text
    for row in (
        "28 KiB",
        "not pinned",
        "pinning it",
        "stores by the sidecar, pieces of 2 MiB",
        "loads by the engine",
    ):
        assert f"| {row}" in text
