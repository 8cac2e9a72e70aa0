"""Load or recompute: what a tier's rate is, and what is left below because of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.tiers.tiered.load_or_recompute import Rate, should_load
from tests.harness.tiered_world import NUM_COLUMNS, SIZE, chain, run, until

ROW_BYTES = SIZE * NUM_COLUMNS


def test_one_reader_s_rate():
    rate = Rate()
    assert rate.bytes_per_second(0.0) == 0.0
    rate.begin(10.0)
    assert rate.bytes_per_second(11.0) == 0.0
    rate.end(12.0, 100)
    assert rate.bytes_per_second(12.0) == 50.0


def test_readers_together_are_as_fast_as_they_are_together():
    rate = Rate()
    rate.begin(0.0)
    rate.begin(0.0)
    rate.end(1.0, 100)
    rate.end(1.0, 100)
    assert rate.bytes_per_second(1.0) == pytest.approx(200, rel=0.06)


def test_idle_time_and_loads_that_brought_nothing_do_not_count():
    rate = Rate()
    rate.begin(0.0)
    rate.end(1.0, 100)
    rate.begin(20.0)
    rate.end(30.0, 0)  # it failed, at its deadline
    rate.begin(40.0)
    rate.end(41.0, 100)
    assert rate.bytes_per_second(41.0) == pytest.approx(100)


def test_the_last_loads_count_most():
    rate = Rate()
    for second in range(100):
        rate.begin(float(second))
        rate.end(second + 0.5, 10 if second < 80 else 1000)
    assert rate.bytes_per_second(100.0) == pytest.approx(2000, rel=0.15)


def test_one_stall_tells_nothing():
    rate = Rate()
    now = 0.0
    for seconds in (0.7, *[0.002] * 100):
        rate.begin(now)
        now += seconds
        rate.end(now, 1)
        assert not rate.is_certain
    for _ in range(10):
        rate.begin(now)
        now += 0.05
        rate.end(now, 1)
    assert rate.is_certain, "slow for a second"


def test_a_rate_of_long_ago_has_no_say_in_a_new_one():
    rate = Rate()
    rate.begin(0.0)
    rate.end(10.0, 1)
    rate.begin(80.0)
    rate.end(80.1, 100)
    assert rate.bytes_per_second(80.1) == pytest.approx(1000)
    assert not rate.is_certain


def test_a_rate_of_long_ago_is_not_known():
    rate = Rate()
    rate.begin(0.0)
    rate.end(10.0, 1)
    assert rate.bytes_per_second(69.0) > 0
    assert rate.bytes_per_second(71.0) == 0.0


@given(*[st.floats(0, 1e12)] * 2)
def test_what_is_not_known_is_tried(bytes_per_second, seconds):
    assert should_load(1 << 40, 0.0, seconds)
    assert should_load(1 << 40, bytes_per_second, 0.0)


def test_loading_must_win_clearly():
    assert should_load(79, 100.0, 1.0)
    assert not should_load(80, 100.0, 1.0)


async def measure(world, seconds: float) -> None:
    """Load one row in so many seconds."""
    world.remote.fill(chain(1, start=900))
    world.remote.held = {"load"}
    world.remote.open.clear()
    assert world.lookup(chain(1, start=900), "measures").is_probing
    await until(lambda: world.remote.num_waiting)
    world.now += seconds
    world.remote.open.set()
    await world.until_resident(chain(1, start=900))


@run
async def test_what_is_faster_computed_is_left_below(world):
    world.remote.fill(chain(3))
    await measure(world, 1.0)
    assert world.lower.bytes_per_second == ROW_BYTES
    assert world.lookup(chain(3), row_seconds=1.2).is_probing
    await until(lambda: world.lower.stats.skipped_slower_than_recompute)
    found = world.lookup(chain(3), row_seconds=1.2)
    assert (found.num_pending, found.is_probing) == (0, False)
    assert world.lower.stats.skipped_slower_than_recompute == 3
    assert world.remote.calls["load"] == NUM_COLUMNS  # of the measurement


@run
async def test_a_tier_is_not_passed_by_for_one_slow_load(world):
    world.remote.fill(chain(3))
    await measure(world, 0.9)
    assert world.lookup(chain(3), row_seconds=0.001).is_probing
    await until(lambda: world.lower.stats.promoted == 4)
    assert world.lower.stats.skipped_slower_than_recompute == 0


@run
async def test_another_request_s_engine_may_be_slower(world):
    world.remote.fill(chain(3))
    await measure(world, 1.0)
    assert world.lookup(chain(3), "fast", row_seconds=1.2).is_probing
    await until(lambda: world.lower.stats.skipped_slower_than_recompute)
    assert world.lookup(chain(3), "slow", row_seconds=1.3).is_probing
    await until(lambda: world.lower.stats.promoted == 4)


@run
async def test_without_a_prefill_rate_all_is_brought(world):
    world.remote.fill(chain(3))
    await measure(world, 1000.0)
    await world.until_resident(chain(3))
    assert world.lower.stats.skipped_slower_than_recompute == 0


@run
async def test_what_waits_before_does_not_count(world):
    """Those requests wait for the engine as well: all that arrive together are brought up."""
    world.remote.fill(chain(4))
    await measure(world, 1.0)
    world.remote.open.clear()
    assert world.lookup(chain(3), "first").is_probing
    await until(lambda: world.remote.num_waiting == 2)
    world.remote.fill(chain(1, start=50))
    assert world.lookup(chain(1, start=50), "second", row_seconds=1.3).is_probing
    await until(lambda: world.lower.num_loads == 4)
    world.remote.open.set()
    await world.until_resident(chain(1, start=50))
    assert world.lower.stats.skipped_slower_than_recompute == 0
