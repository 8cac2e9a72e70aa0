"""Eight threads on one store, and every byte compared; ``python -m benchmarks stress`` goes on a minute."""

from __future__ import annotations

import sys

import pytest

from testing.stress import Stress


def test_eight_threads_never_see_bytes_that_are_not_theirs():
    stress = Stress()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many switches within a call as can be
    try:
        stress.run(num_threads=8, seconds=1)
    finally:
        sys.setswitchinterval(interval)
    assert min(stress.counts[action] for action in ("put", "get", "read_prompt", "remove", "resize")) > 0


def test_the_stress_finds_what_it_looks_for(monkeypatch):
    """Two rows that share a slot."""
    stress = Stress()
    allocator = stress.store._rows.allocator
    real = allocator.first_slot
    monkeypatch.setattr(allocator, "first_slot", lambda row: real(row) & ~1)
    with pytest.raises(AssertionError, match=r"bytes of|two writers"):
        stress.run(num_threads=8, seconds=20)
