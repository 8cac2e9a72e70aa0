"""Processor time of test files: what is counted, and when a run fails."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.harness.cpu_budget import OUTSIDE, ProcessTree, Report

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\n"


def test_a_process_counts_once_when_it_has_ended():
    tree = ProcessTree()
    subprocess.run([sys.executable, "-c", BURN], check=True, capture_output=True)
    assert tree.used() >= 0.4
    assert tree.used() < 0.3


BUDGET = {"sum": 2000, "default": {"seconds": 10}, "files": {"test_large.py": {"seconds": 30}}}


@pytest.mark.parametrize(
    ("seconds", "is_enforced", "status"),
    [
        ({"test_large.py": 74.0, "test_small.py": 34.0, OUTSIDE: 99.0}, True, 0),
        ({"test_large.py": 76.0}, True, 1),
        ({"test_small.py": 36.0}, True, 1),
        ({f"test_{number}.py": 9.0 for number in range(300)}, True, 1),
        ({"test_small.py": 36.0}, False, 0),
    ],
)
def test_a_file_or_a_run_far_over_its_budget_fails_in_ci(tmp_path, seconds, is_enforced, status):
    report = Report(tmp_path / "cpu.json", BUDGET, is_enforced)
    report.pytest_testnodedown(SimpleNamespace(workeroutput={"cpu_seconds": seconds}))
    session = SimpleNamespace(
        exitstatus=0, config=SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _: None))
    )
    report.pytest_sessionfinish(session)
    assert session.exitstatus == status
    assert json.loads((tmp_path / "cpu.json").read_text()) == seconds
