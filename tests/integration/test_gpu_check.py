"""``make gpu-check`` reports a missing GPU, and works with a driver."""

import os
import subprocess
import sys

import pytest

from testing import cuda
from testing.child_process import REPOSITORY
from testing.deadlines import CALLS

DEADLINES = CALLS

pytestmark = pytest.mark.rotating


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


@pytest.mark.parametrize("is_simulated", [False, True])
def test_missing_gpu_is_reported_and_no_file_is_written(tmp_path, is_simulated):
    report = tmp_path / "facts.md"
    with cuda.node() as node:
        environment = node.environment() if is_simulated else {"CUDA_VISIBLE_DEVICES": ""}
        completed = check("--output", report, **environment)
    assert completed.returncode == 2
    assert ("no GPU here: the simulated driver" if is_simulated else "no GPU here") in completed.stderr
    assert not report.exists()


def test_simulated_check_writes_every_section_of_the_report(tmp_path):
    report = tmp_path / "facts.md"
    with cuda.node() as node:
        completed = check("--output", report, "--simulated", "--no-tests", **node.environment())
        assert completed.returncode == 0, completed.stderr
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
