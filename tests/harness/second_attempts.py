"""A pytest plugin that runs a failed test of real processes once more.

Tests in ``integration`` and ``e2e`` share a few cores with engines, servers and other tests. On a busy
machine a process may get no core for seconds, and a step that such a test waits for comes too late. The
summary lists the first attempt with its traceback. Each one is a defect of the test or of the product.
``pyproject.toml`` limits the number of second attempts in a run, so that a defect that fails many tests
fails the run. Unit tests have one attempt.
"""

from __future__ import annotations

import pytest

_FOLDERS = {"integration", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow a second attempt to tests that start real processes."""
    for item in items:
        if _FOLDERS & set(item.path.parts):
            item.add_marker(pytest.mark.flaky(reruns=1))
