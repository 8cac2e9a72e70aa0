"""A pytest plugin that runs a failed test of real processes once more.

Tests in ``integration`` and ``e2e`` share a few cores with engines, servers and other tests. On a busy
machine a process may get no core for seconds, and a step that such a test waits for comes too late. The
second attempt gets new fixtures, except for those of the session: the first one may have stored prompts, or
stopped a server. The summary lists the first attempt with its traceback. Each one is a defect of the test or
of the product. ``pyproject.toml`` limits the number of second attempts in a run, so that a defect that fails
many tests fails the run. Unit tests have one attempt.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

_FOLDERS = {"integration", "e2e"}
_HAS_FAILED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow a second attempt to tests that start real processes."""
    for item in items:
        if _FOLDERS & set(item.path.parts):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record whether the test has failed."""
    report = yield
    item.stash[_HAS_FAILED] = report.failed or (call.when != "setup" and item.stash[_HAS_FAILED])
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Close the fixtures of the module after a failure, so that the next attempt or test opens new ones.

    pytest has no public call for this. The plugin for second attempts uses the same one.
    """
    if item.stash[_HAS_FAILED] and item.get_closest_marker("flaky"):
        item.session._setupstate.teardown_exact(item.session)  # type: ignore[arg-type]
