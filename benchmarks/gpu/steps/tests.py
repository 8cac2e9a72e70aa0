"""The tests of the CUDA code, on the real driver."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu.noted_tests import STARTED, VARIABLE
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale
from lmcache_client.cuda.driver import Device

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/gpu",
    "tests/integration/test_sidecar_copies.py",
    "tests/integration/test_sidecar_copy_faults.py",
]
"""Tests for any driver. They skip cases that need the controls of the simulated driver."""
TINY_TESTS = ["tests/gpu/cuda/test_cuda_ipc.py", "tests/integration/test_sidecar_copies.py"]
"""On the simulated driver, which these tests take for a real one here."""
ALLOWED_SKIPS = (
    "a real driver has no setting",
    "a real driver takes no orders",
    "a real driver has no counters",
    "only one real GPU is tested",
    "the driver is not simulated",
)
"""Reasons of tests that need the simulated driver. Any other skip is a problem, because it hides a fault."""
_LEAST_PASSED = 120
_MAX_WORKERS = 6
_REPORT_SECONDS = 8.0
"""Time to report what was noted, if the tests do not end."""
_CONFIGURATION = """[pytest]
timeout = {seconds}
faulthandler_timeout = 40
"""
_TEST_SECONDS = 60


def run(results: Results, scale: Scale) -> None:
    notes = results.folder / "tests.jsonl"
    notes.unlink(missing_ok=True)
    configuration = results.folder / "pytest.ini"  # that of the project needs plugins that these tests don't
    seconds = _TEST_SECONDS * (4 if scale.is_tiny else 1)  # a machine with the simulated driver may be busy
    configuration.write_text(_CONFIGURATION.format(seconds=seconds))
    environment = os.environ | {"LMCACHE_TEST_GPU": Device.visible()[0].uuid, VARIABLE: str(notes)}
    tests = TINY_TESTS if scale.is_tiny else TESTS
    command = [*_command(configuration), *tests]
    status = _status(command, environment, results.seconds_left() - _REPORT_SECONDS)
    _report(results, notes, status, tests, 5 if scale.is_tiny else _LEAST_PASSED)


def _command(configuration: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    command += ["-c", str(configuration), f"--rootdir={ROOT}", "--import-mode=importlib"]
    command += ["-p", "benchmarks.gpu.noted_tests"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_MAX_WORKERS, os.cpu_count() or 1)), "--dist", "loadfile"]
    return command


def _status(command: list[str], environment: dict[str, str], seconds: float) -> int | None:
    """Run pytest, and kill all its processes at the end. Returns its status, None if it does not end."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also if this step is stopped
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
            process.wait(_REPORT_SECONDS / 2)


def _read(notes: Path) -> list[dict[str, str]]:
    """Return what the tests noted. If they were killed, the last line may be incomplete."""
    lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _report(results: Results, notes: Path, status: int | None, tests: list[str], least_passed: int) -> None:
    entries = _read(notes)
    counts = Counter(entry["outcome"] for entry in entries)
    section = results.section(
        "Tests", ("outcome", "number"), f"`{'`, `'.join(tests)}` with the driver of this host."
    )
    for outcome in ("passed", "failed", "skipped"):
        section.add(outcome, str(counts[outcome]))
    meaning = "copies of KV may fail or be wrong on this GPU: don't use the cache on it, and send us the page"
    for entry in entries:
        reason = " ".join(re.sub(r"^Skipped: ", "", entry["reason"]).split())
        is_allowed = any(allowed in reason for allowed in ALLOWED_SKIPS)
        if entry["outcome"] == "failed":
            results.problem(f"{entry['test']} failed in phase {entry['phase']}: {reason}", meaning)
        elif entry["outcome"] == "skipped" and not is_allowed:
            results.problem(f"{entry['test']} was skipped: {reason}", "this part was not tested")
    if status is None:
        ended = {entry["test"] for entry in entries if entry["outcome"] != STARTED}
        running = [entry["test"] for entry in entries if entry["test"] not in ended]
        text = f"the tests did not end in time; still running: {', '.join(running) or 'none'}"
        results.problem(text, "not all of the CUDA code was tested")
    elif counts["passed"] < least_passed:
        results.problem(f"only {counts['passed']} tests passed", "most of the CUDA code was not tested")
    elif status and not results.num_problems:
        results.problem(f"pytest ended with status {status}: see logs/tests.log", meaning)
