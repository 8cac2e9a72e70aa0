"""Benchmark of two tenants: its figures, and a small run on a real sidecar with a disk or a Redis."""

import pytest

from benchmarks import tenants
from benchmarks.tenants import BOTH, FLOOD, QUIET, Phase

ROUNDS = 9


def phases_of(quiet_rows, flood_rows):
    """Return phases of a second each, with these rows of both tenants when they are active at once."""
    return {
        QUIET: [Phase(1.0, 100, 0)] * ROUNDS,
        FLOOD: [Phase(1.0, 120, 0)] * ROUNDS,
        BOTH: [Phase(1.0, quiet_rows, flood_rows)] * ROUNDS,
    }


def test_equal_turns_hold_both_bars():
    contended, share, flood, *rates = tenants.figures("store, disk", phases_of(50, 50), 10**9)
    assert (contended.value, contended.holds) == (50, True)
    assert (share.value, share.holds) == (50, True)
    assert flood.value == pytest.approx(100 * 50 / 120)
    assert [rate.value for rate in rates] == [100, 120]


def test_shares_in_proportion_to_rows_in_flight_miss_both_bars():
    contended, share, *_ = tenants.figures("load, Redis", phases_of(25, 75), 10**9)
    assert (contended.holds, share.holds) == (False, False)
