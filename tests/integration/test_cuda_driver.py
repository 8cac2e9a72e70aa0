"""Runs tests on the simulated driver, in one process.

- tests of the driver API and of fences, which a GPU runs, too
- the tests of block lifetimes with KV in memory of the simulated GPU: the sidecar or the engine copies. Tests
  of fences check that a copy that ignores a fence would be detected, because kernels run late there
  (``tests/harness/sim/device.py``).
"""

import os
import subprocess
import sys

import pytest

from testing import cuda
from testing.child_process import REPOSITORY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FILES = ("tests/gpu/cuda", "tests/gpu/engine", "tests/integration/test_vllm_lifetimes.py")
SHAPES = "not runner or runner1-drafts-sync or runner2-plain-async"


def test_tests_of_gpus_pass_on_the_simulated_driver():
    with cuda.node(devices=(cuda.GPU, cuda.OTHER_GPU, cuda.MIG_SLICE)) as node:
        completed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *FILES, "-k", SHAPES],
            cwd=REPOSITORY,
            env=os.environ | node.environment() | {"LMCACHE_TEST_SCOPE": "all"},
            capture_output=True,
            text=True,
            timeout=840,
        )
    print(completed.stdout, completed.stderr)
    assert completed.returncode == 0
    assert "skipped" not in completed.stdout
