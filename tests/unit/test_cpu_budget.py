"""Processor time of test files: what is counted, and when a run fails."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from testing.child_process import REPOSITORY
from tests.harness.cpu_budget import OUTSIDE, REFERENCE_MS, Report

COUNT = """
import subprocess, sys
from tests.harness.cpu_budget import ProcessTree
tree = ProcessTree()
burn = "import time\\nwhile time.process_time() < 0.4: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
print(tree.used(), tree.used())
"""


def test_a_process_counts_once_when_it_has_ended():
    """In a process of its own, because programs of other tests may be children of this process."""
    done = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True)
    first, second = map(float, done.stdout.split())
    assert first >= 0.38, "the child computes for 0.4 s, and the kernel counts in two numbers of ticks"
    assert second < 0.3


BUDGET = {"sum": 2000, "default": {"seconds": 10}, "files": {"test_large.py": {"seconds": 30}}}


def exit_status(report):
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _: None))
    session = SimpleNamespace(exitstatus=0, config=config)
    report.pytest_sessionfinish(session)
    return session.exitstatus


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
    assert exit_status(report) == status
    assert json.loads((tmp_path / "cpu.json").read_text()) == seconds


@pytest.mark.parametrize(("probes", "status"), [([0.5], 1), ([1.0, 2.0], 1), ([1.0, 3.2], 0)])
def test_budgets_grow_on_a_slow_processor(tmp_path, probes, status):
    report = Report(tmp_path / "cpu.json", BUDGET, is_enforced=True)
    seconds = {"test_large.py": 137.0} | {f"test_{number}.py": 25.0 for number in range(200)}
    for half in (probes[::2], probes[1::2]):
        output = {"cpu_probes_ms": [REFERENCE_MS * each for each in half]}
        report.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    report.pytest_testnodedown(SimpleNamespace(workeroutput={"cpu_seconds": seconds}))
    assert exit_status(report) == status


def test_summary_of_pytest_names_the_file_that_fails_the_run(tmp_path):
    """``.ci/run`` and logs show the last lines only."""
    (tmp_path / "test_small.py").write_text("def test(): pass")
    (tmp_path / "conftest.py").write_text(
        "from tests.harness.cpu_budget import Report\n"
        "def pytest_configure(config):\n"
        f"    report = Report(config.rootpath / 'cpu.json', {BUDGET}, True)\n"
        "    report.seconds['test_small.py'] = 36.0\n"
        "    config.pluginmanager.register(report)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "CI": "true"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, error, end = done.stdout.splitlines()
    assert error.startswith("ERROR test_small.py - 36.0 CPU-s, budget 10.0: make it lighter")
    assert end.startswith("1 passed, 1 error in ")


def test_workers_report_the_speed_of_their_processor(tmp_path):
    (tmp_path / "test_small.py").write_text("def test(): pass")
    (tmp_path / "conftest.py").write_text(
        "from tests.harness import cpu_budget\n"
        "cpu_budget.INTERVAL_SECONDS = 0.001\n"
        "pytest_plugins = ['tests.harness.cpu_budget']\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--cpu-report", "cpu.json"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"x the budgets .* because a probe took \d+\.\d\d ms", done.stdout), done.stdout
