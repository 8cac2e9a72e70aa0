"""Settings for all tests. Fixtures that several test folders share live in tests/harness."""

import os

from hypothesis import settings

from testing.workers import is_worker

if is_worker():
    # Set before torch is imported: the teams of threads of two workers would wait for each other's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.harness.kube", "tests.harness.leaks"]

# How long an example takes is the machine's business: a busy one must not fail a test.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
