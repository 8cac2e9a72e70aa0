"""Deadlines of a process: standard values, values from the environment, and bad input."""

import os
import subprocess
import sys

import pytest

from lmcache_store.common.timing import TIMING, Timing
from testing.deadlines import PATIENT, STANDARD, VARIABLE, deadlines


@pytest.fixture
def timing():
    return Timing()


def test_text_sets_deadlines_and_leaves_others_at_their_standard_values(timing):
    timing.read("copy_seconds=0.5,hold_seconds=60")
    assert timing == Timing(copy_seconds=0.5, hold_seconds=60)
    timing.read("call_seconds=7")
    assert timing == Timing(call_seconds=7)
    timing.read(STANDARD)
    assert timing == Timing()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("copy=1", "'copy' is not one of hello_seconds, .*copy_seconds"),
        ("copy_seconds=soon", "soon"),
        ("copy_seconds=nan", "nan"),
        ("copy_seconds=-1", "-1"),
        ("copy_seconds", "dictionary update sequence"),
    ],
)
def test_bad_text_changes_nothing(timing, text, message):
    with pytest.raises(ValueError, match=message):
        timing.read(f"hold_seconds=9,{text}")
    assert timing == Timing()


def test_patient_deadlines_are_a_minute_except_for_waits_of_requests():
    with deadlines(PATIENT):
        short = [name for name, seconds in vars(TIMING).items() if seconds < 60]
    assert short == ["row_seconds", "first_row_seconds"]
    assert Timing() == TIMING


@pytest.mark.parametrize(("text", "expected"), [("call_seconds=9", "9.0"), ("call_seconds=x", "2.0")])
def test_a_process_reads_its_environment_and_starts_with_a_bad_one(text, expected):
    code = "from lmcache_store.common.timing import TIMING; print(TIMING.call_seconds)"
    environment = {**os.environ, VARIABLE: text}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected
    assert ("LMCACHE_TIMING has no effect" in done.stderr) == (expected == "2.0")
