"""A pytest plugin: writes the outcome of each test to the file ``GPU_CHECK_TESTS``, as soon as it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "GPU_CHECK_TESTS"
_MAX_REASON = 300


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test did: calls, skips, and failures of any phase."""
    if report.when == "call" or not report.passed:
        _note(report.nodeid, report.outcome, str(report.when), _reason(report.longrepr))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that can't be collected, or skips itself."""
    if not report.passed:
        _note(report.nodeid, report.outcome, "collect", _reason(report.longrepr))


def _reason(text: object) -> str:
    if isinstance(text, tuple):  # of a skip: file, line, message
        return str(text[-1])
    crash = getattr(text, "reprcrash", None)
    return str(crash.message if crash is not None else text or "")[:_MAX_REASON]


def _note(test: str, outcome: str, phase: str, reason: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the controller gets the reports of its workers
        return
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "phase": phase, "reason": reason}) + "\n")
