"""The rules of block lifetimes where KV is memory of the simulated GPU: copied by the sidecar, by the engine.

The tests are those of the host's memory, and two that see to it that a copy that ignores a fence would be
found. Kernels are late there (``tests/harness/sim_device.py``).
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


def test_on_the_simulated_gpu():
    with cuda.node() as node:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *FILES, "-k", SHAPES],
            cwd=REPOSITORY,
            env=os.environ | node.environment(),
            capture_output=True,
            text=True,
            timeout=840,
        )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "skipped" not in done.stdout
