"""Settings for all tests. Fixtures that several test folders share live in tests/harness."""

import os
import signal

from testing.workers import is_worker

if is_worker():
    # Set before torch is imported: thread teams of two workers would wait for each other's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts commands in the background with SIGINT ignored. Programs under test would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.harness.cpu_budget",
    "tests.harness.distribution",
    "tests.harness.kube",
    "tests.harness.leaks",
    "tests.harness.light",
    "tests.harness.scope",
]
