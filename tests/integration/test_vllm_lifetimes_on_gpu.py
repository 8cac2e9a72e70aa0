"""The tests of block lifetimes with KV in memory of the simulated GPU. The sidecar or the engine copies.

Two more tests check that a copy that ignores a fence would be detected, because kernels run late there
(``tests/harness/sim_device.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testing import cuda
from testing.child_process import REPOSITORY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FILES = ["tests/integration/test_vllm_lifetimes.py", "tests/gpu/engine"]
SHAPES = "not runner or runner1-drafts-sync or runner2-plain-async"


def test_lifetime_tests_pass_on_the_simulated_gpu():
    with cuda.node() as node:
        completed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *FILES, "-k", SHAPES],
            cwd=REPOSITORY,
            env=os.environ | node.environment(),
            capture_output=True,
            text=True,
            timeout=840,
        )
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 0
    assert "skipped" not in completed.stdout
