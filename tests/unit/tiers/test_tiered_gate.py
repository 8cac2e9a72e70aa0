"""Load or recompute: the measured rate of a tier, and the rows that are not promoted because of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.tiers.load_or_recompute import Rate, should_load
from tests.harness.tiers.tiered_world import NUM_COLUMNS, SIZE, chain, run, until

ROW_BYTES = SIZE * NUM_COLUMNS


@pytest.mark.parametrize(
    ("loads", "now", "bytes_per_second", "is_certain"),
    [
        pytest.param([], 0.0, 0.0, False, id="no load"),
        pytest.param([(10.0, 12.0, 100)], 12.0, 50.0, True, id="a single reader"),
        pytest.param(
            [(0.0, 1.0, 100), (20.0, 30.0, 0), (40.0, 41.0, 100)], 41.0, 100.0, True, id="idle and failed"
        ),
        pytest.param([(0.0, 10.0, 1), (80.0, 80.1, 100)], 80.1, 1000.0, False, id="a load of long ago"),
        pytest.param([(0.0, 10.0, 1)], 69.0, 0.1, True, id="a minute later"),
        pytest.param([(0.0, 10.0, 1)], 71.0, 0.0, True, id="expired"),
    ],
)
def test_rate_is_the_bytes_per_second_of_recent_loads(loads, now, bytes_per_second, is_certain):
    rate = Rate()
    for begin, end, num_bytes in loads:
        rate.begin(begin)
        rate.end(end, num_bytes)
    assert rate.bytes_per_second(now) == pytest.approx(bytes_per_second)
    assert rate.is_certain == is_certain


def test_rate_of_concurrent_readers_is_their_joint_rate():
    rate = Rate()
    rate.begin(0.0)
    rate.begin(0.0)
    assert rate.bytes_per_second(1.0) == 0.0
    rate.end(1.0, 100)
    rate.end(1.0, 100)
    assert rate.bytes_per_second(1.0) == pytest.approx(200, rel=0.06)


def test_recent_loads_have_the_largest_weight():
    rate = Rate()
    for second in range(100):
        rate.begin(float(second))
        rate.end(second + 0.5, 10 if second < 80 else 1000)
    assert rate.bytes_per_second(100.0) == pytest.approx(2000, rel=0.15)


def test_rate_is_uncertain_after_a_single_stall():
    rate = Rate()
    now = 0.0
    for seconds, is_certain in ((0.7, False), *[(0.002, False)] * 100, *[(0.05, None)] * 9, (0.05, True)):
        rate.begin(now)
        now += seconds
        rate.end(now, 1)
        assert is_certain in (None, rate.is_certain), "certain after a second of slow loads"


@given(*[st.floats(0, 1e12)] * 2)
def test_loads_if_a_rate_is_unknown(bytes_per_second, seconds):
    assert should_load(1 << 40, 0.0, seconds)
    assert should_load(1 << 40, bytes_per_second, 0.0)


def test_loads_only_if_clearly_faster_than_recomputing():
    assert should_load(79, 100.0, 1.0)
    assert not should_load(80, 100.0, 1.0)


async def measure(world, seconds: float) -> None:
    """Load one row in ``seconds`` seconds."""
    world.remote.fill(chain(1, start=900))
    world.remote.hold("load")
    assert world.lookup(chain(1, start=900), "measurement").is_probing
    await until(lambda: world.remote.num_waiting)
    world.now += seconds
    world.remote.open.set()
    await world.until_resident(chain(1, start=900))


@run
async def test_decision_uses_the_prefill_rate_of_the_request(world):
    world.remote.fill(chain(3))
    await measure(world, 1.0)
    assert world.lower.bytes_per_second == ROW_BYTES
    assert world.lookup(chain(3), "fast", row_seconds=1.2).is_probing
    await until(lambda: world.lower.stats.skipped_slower_than_recompute)
    answer = world.lookup(chain(3), "fast", row_seconds=1.2)
    assert (answer.num_pending, answer.is_probing) == (0, False)
    assert world.lower.stats.skipped_slower_than_recompute == 3
    assert world.remote.calls["load"] == NUM_COLUMNS  # loads of the measurement only
    assert world.lookup(chain(3), "slow", row_seconds=1.3).is_probing
    await until(lambda: world.lower.stats.promoted == 4)


@pytest.mark.parametrize(
    ("seconds", "row_seconds"),
    [pytest.param(0.9, 0.001, id="a single slow load"), pytest.param(1000.0, 0.0, id="no prefill rate")],
)
@run
async def test_promotes_all_rows_if_a_rate_is_uncertain(world, seconds, row_seconds):
    world.remote.fill(chain(3))
    await measure(world, seconds)
    assert world.lookup(chain(3), row_seconds=row_seconds).is_probing
    await until(lambda: world.lower.stats.promoted == 4)
    assert world.lower.stats.skipped_slower_than_recompute == 0


@run
async def test_queued_loads_do_not_count(world):
    """Queued requests wait for the engine, too, so all rows of requests that arrive together are promoted."""
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
