"""Stress test of the local store with eight threads that compare every byte.

``python -m benchmarks stress`` runs the same test for a minute.
"""

import sys

import pytest

from testing.stress import Stress


def test_eight_threads_read_only_their_payloads():
    stress = Stress()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # switch threads as often as possible
    try:
        stress.run(num_threads=8, seconds=1)
    finally:
        sys.setswitchinterval(interval)
    assert min(stress.counts[action] for action in ("put", "get", "read_prompt", "remove", "resize")) > 0


def test_stress_detects_two_rows_in_the_same_slot(monkeypatch):
    """The allocator is patched to give two rows the same slot."""
    stress = Stress()
    allocator = stress.store._rows.allocator
    real = allocator.first_slot
    monkeypatch.setattr(allocator, "first_slot", lambda row: real(row) & ~1)
    with pytest.raises(AssertionError, match=r"bytes of|two writers"):
        stress.run(num_threads=8, seconds=20)
