"""A pytest plugin: writes start and outcome of each test to the file ``GPU_CHECK_TESTS``, as they happen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "GPU_CHECK_TESTS"
_MAX_REASON = 300
STARTED = "started"


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes in one process. pytest-xdist's controller gets the reports of its workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(os.environ[VARIABLE])))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts. If it hangs, this is its only entry."""
        self._write(nodeid, STARTED, "setup", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what a test did: calls, skips, and failures of any phase."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, str(report.when), _reason(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write that a file can't be collected, or skips itself."""
        if not report.passed:
            self._write(report.nodeid, report.outcome, "collect", _reason(report.longrepr))

    def _write(self, test: str, outcome: str, phase: str, reason: str) -> None:
        entry = {"test": test, "outcome": outcome, "phase": phase, "reason": reason}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _reason(text: object) -> str:
    if isinstance(text, tuple):  # of a skip: file, line, message
        return str(text[-1])
    crash = getattr(text, "reprcrash", None)
    return str(crash.message if crash is not None else text or "")[:_MAX_REASON]
