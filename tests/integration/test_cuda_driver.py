"""Runs the driver API tests, which a GPU runs too, on the simulated driver, in one process for each file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testing import cuda
from testing.child_process import REPOSITORY

FILES = sorted((REPOSITORY / "tests" / "gpu" / "cuda").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_driver_tests_pass_on_the_simulated_driver(file):
    with cuda.node(devices=(cuda.GPU, cuda.OTHER_GPU, cuda.MIG_SLICE)) as node:
        completed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", str(file)],
            cwd=REPOSITORY, env=os.environ | node.environment(), capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 0
    assert "skipped" not in completed.stdout
