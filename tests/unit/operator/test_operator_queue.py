"""The queue of keys, on an event loop with a simulated clock."""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.errors import OperatorError
from lmcache_operator.queue import BACKOFF, NUM_RESERVED, KeyedQueue
from tests.harness.jumping_loop import now, run


async def wait_until_empty(queue: KeyedQueue[str]) -> None:
    while len(queue):  # noqa: ASYNC110 - simulated time, nothing waits
        await asyncio.sleep(1)


events = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from("abc"), st.sampled_from([None, 1, 2])), min_size=1, max_size=20
)  # seconds after the previous event, key, version


@given(events, st.floats(0, 0.5), st.integers(1, 3), st.sets(st.integers(0, 10)))
def test_each_wake_up_is_followed_by_a_run(wakes, work_seconds, num_workers, failing):
    """A full run of the key follows each wake-up, also when other runs are active or fail."""

    async def scenario() -> None:
        starts: dict[str, list[float]] = defaultdict(list)
        running: list[str] = []
        num_runs = 0

        async def work(key: str) -> float | None:
            nonlocal num_runs
            num_runs += 1
            assert key not in running, "two concurrent runs of a key"
            running.append(key)
            assert len(running) <= num_workers + NUM_RESERVED
            starts[key].append(now())
            is_failing = num_runs in failing
            await asyncio.sleep(work_seconds)
            running.remove(key)
            if is_failing:
                raise OperatorError("try again")
            return None

        queue = KeyedQueue(work, num_workers=num_workers)
        wake_times: dict[str, float] = {}
        known_versions: dict[str, int] = {}
        for pause, key, version in wakes:
            await asyncio.sleep(pause)
            queue.wake(key, version)
            if version is None or version != known_versions.get(key):
                wake_times[key] = now()
                known_versions |= {} if version is None else {key: version}
        await wait_until_empty(queue)
        assert all(starts[key][-1] >= wake_times[key] for key in wake_times)

    run(scenario())


def test_changed_keys_run_before_new_and_other_keys() -> None:
    async def scenario() -> list[str]:
        runs: list[str] = []

        async def work(key: str) -> float:
            runs.append(key)
            await asyncio.sleep(1)
            return 100.0

        queue = KeyedQueue(work, num_workers=1)
        for key in "abc":
            queue.wake(key)  # an event of its child precedes its own event
            queue.wake(key, version=1)
        await asyncio.sleep(10)
        queue.wake("new-1", version=1)
        await asyncio.sleep(0.5)
        queue.wake("a")  # an event of its child
        queue.wake("b")
        queue.wake("new-2", version=1)
        queue.wake("c")
        queue.wake("c", version=2)  # a change of its spec
        await asyncio.sleep(10)
        queue.wake("c")
        queue.wake("a")
        await asyncio.sleep(10)
        await queue.close()
        return runs

    assert run(scenario()) == ["a", "b", "c", "new-1", "c", "new-2", "a", "b", "c", "a"]


def test_keys_that_change_all_the_time_leave_workers_to_others() -> None:
    async def scenario() -> int:
        runs: list[str] = []

        async def work(key: str) -> float:
            runs.append(key)
            await asyncio.sleep(0.3)
            return 1000.0

        queue = KeyedQueue(work, num_workers=2)
        keys = [f"changing-{number}" for number in range(20)]
        for key in (*keys, "other"):
            queue.wake(key, version=0)
        await asyncio.sleep(10)
        runs.clear()
        for version in range(1, 100):
            for key in keys:
                queue.wake(key, version)
            if version == 10:
                queue.wake("other")  # an event of its child
            await asyncio.sleep(0.2)
        await queue.close()
        return runs.count("other")

    assert run(scenario()) == 1


def test_changed_key_does_not_wait_for_hanging_work() -> None:
    async def scenario() -> list[str]:
        starts: list[str] = []

        async def work(key: str) -> float:
            starts.append(key)
            await asyncio.sleep(1000 if key.startswith("hanging") and starts.count(key) > 1 else 0)
            return 5000.0

        queue = KeyedQueue(work, num_workers=2)
        keys = ("hanging-1", "hanging-2", "waiting", "changed")
        for key in keys:
            queue.wake(key, version=1)
        await asyncio.sleep(10)
        starts.clear()
        for key in ("hanging-1", "hanging-2", "waiting"):
            starts.append(key)
            queue.wake(key)
        await asyncio.sleep(10)
        starts.clear()
        queue.wake("changed")
        await asyncio.sleep(10)
        assert (starts, queue.num_waiting) == ([], 2)
        queue.wake("changed", version=2)
        await asyncio.sleep(10)
        await queue.close()
        return starts

    assert run(scenario()) == ["changed"]


def runs_of(
    seconds: float, script: Callable[[KeyedQueue[str]], None], *, pause: float | None, run_seconds: float = 0
) -> list[float]:
    """Times at which the only key of a queue runs while the script wakes it. Each run asks for a pause."""

    async def scenario() -> list[float]:
        times: list[float] = []

        async def work(_: str) -> float | None:
            times.append(now())
            await asyncio.sleep(run_seconds)
            return pause

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        script(queue)
        await asyncio.sleep(seconds)
        await queue.close()
        return times

    return run(scenario())


def wake_at(queue: KeyedQueue[str], *times: float, version: Any = None) -> None:
    for time in times:
        asyncio.get_running_loop().call_later(time, queue.wake, "a", version)


def test_known_version_wakes_no_key() -> None:
    """The run itself causes an event with the known version.

    Only the requested pause may start the next run.
    """
    times = runs_of(250, lambda queue: wake_at(queue, 0, 0.1, 100.1, version="a version"), pause=100)
    assert times == pytest.approx([0, 100, 200])


def test_burst_of_wake_ups_causes_a_single_run() -> None:
    assert len(runs_of(50, lambda queue: wake_at(queue, *[0] * 50), pause=100)) == 1


def test_wake_ups_during_a_run_cause_another_run() -> None:
    times = runs_of(50, lambda queue: wake_at(queue, 0, 1, 2), pause=None, run_seconds=10)
    assert times == pytest.approx([0, 10])


def test_failures_back_off_and_success_resets_the_back_off(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[float]:
        times: list[float] = []

        async def work(_: str) -> float | None:
            times.append(now())
            if len(times) in (1, 2, 3, 5):
                raise OperatorError("busy") if len(times) < 5 else KeyError("bug")
            return 0.0 if len(times) < 6 else None

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        queue.wake("a")
        await wait_until_empty(queue)
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    pauses = run(scenario())
    for pause, max_pause in zip(pauses, [0.5, 1, 2, 0, 0.5], strict=True):
        assert max_pause / 2 <= pause <= max_pause
    levels = [record.levelno for record in caplog.records if record.name.endswith("queue")]
    assert levels == [logging.WARNING] * 3 + [logging.ERROR]
    assert caplog.records[-1].exc_info is not None  # a bug is logged with its stack


@given(st.integers(1, 10_000))
def test_back_off_stays_within_its_bounds(num_failures: int) -> None:
    assert 0.25 <= BACKOFF.seconds(num_failures) <= 60
    assert num_failures < 8 or BACKOFF.seconds(num_failures) >= 30


def test_hanging_work_is_visible_and_can_be_cancelled() -> None:
    async def scenario() -> None:
        async def work(_: str) -> None:
            await asyncio.Event().wait()

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        assert queue.longest_run_seconds() == 0
        queue.wake("a")
        await asyncio.sleep(400)
        assert queue.longest_run_seconds() == pytest.approx(400)
        await queue.close()
        queue.wake("b")
        assert len(queue) == 0

    run(scenario())


@pytest.mark.parametrize("num_turns", range(5))
def test_close_ends_keys_that_are_woken_at_that_moment(num_turns: int) -> None:
    async def scenario() -> None:
        async def work(_: str) -> float:
            return 1000.0

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        queue.wake("a")
        await asyncio.sleep(1)
        queue.wake("a")
        for _ in range(num_turns):  # of the loop
            await asyncio.sleep(0)
        async with asyncio.timeout(10):  # of the simulated clock
            await queue.close()

    run(scenario())
