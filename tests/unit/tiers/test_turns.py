"""Turns of tenants in the queues of lower tiers: one that floods a queue delays another by one task."""

import asyncio
import sys
import threading
from concurrent.futures import Future
from typing import Any

from lmcache_store.common import fair_queue
from lmcache_store.tiers.tiered import tasks
from lmcache_store.tiers.tiered.tasks import Turns, Workers
from tests.harness.loops import in_a_loop


@in_a_loop
async def test_tenants_take_turns_for_loads():
    served: list[str] = []

    async def load(turns: Turns, tenant: str) -> None:
        await turns.take(tenant)
        served.append(tenant)
        await asyncio.sleep(0)
        turns.give_back()

    turns = Turns(1)
    await turns.take("first")
    flood = [asyncio.create_task(load(turns, "flood")) for _ in range(50)]
    await asyncio.sleep(0)
    quiet = [asyncio.create_task(load(turns, "quiet")) for _ in range(2)]
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*flood, *quiet)
    assert served[:4] == ["flood", "quiet", "flood", "quiet"]
    assert len(served) == 52


@in_a_loop
async def test_cancelled_waits_lose_no_turn():
    turns = Turns(1)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take("b")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.give_back()  # the second task gets the turn, and is cancelled before it runs
    waiting[1].cancel()
    await asyncio.wait_for(waiting[2], 60)
    turns.give_back()
    await asyncio.wait_for(turns.take("c"), 60)
    waiting = [asyncio.create_task(turns.take("d")) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.give_back()  # before the first task knows that it was cancelled
    await asyncio.wait_for(waiting[1], 60)
    late = asyncio.create_task(turns.take("e"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not late.done(), "there is one turn, and the second task has it"
    turns.give_back()
    await asyncio.wait_for(late, 60)


@in_a_loop
async def test_waits_that_time_out_at_once_take_constant_time_each():
    num_waits, num_calls = 1000, 0
    files = {tasks.__file__, fair_queue.__file__}

    def count(frame, event, _) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename in files

    turns = Turns(1)
    await turns.take("flood")
    waiting = [asyncio.create_task(turns.take("flood")) for _ in range(num_waits)]
    quiet = asyncio.create_task(turns.take("quiet"))
    await asyncio.sleep(0)
    sys.setprofile(count)
    try:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    finally:
        sys.setprofile(None)
    late = asyncio.create_task(turns.take("flood"))
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.wait_for(quiet, 60)
    assert not late.done()
    turns.give_back()
    await asyncio.wait_for(late, 60)
    assert not turns._waiting, "tasks that left are not referenced"
    assert 0 < num_calls <= 10 * num_waits


@in_a_loop
async def test_waits_that_end_do_not_delay_the_turn_of_their_tenant():
    turns = Turns(1)
    await turns.take("a")
    left = asyncio.create_task(turns.take("b"))
    remaining = asyncio.create_task(turns.take("b"))
    later = asyncio.create_task(turns.take("c"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    turns.give_back()
    await asyncio.wait_for(remaining, 60)
    assert not later.done()


def test_threads_serve_tenants_in_turn():
    workers, go, order = Workers(1, "turns"), threading.Event(), list[str]()
    futures: list[Future[Any]] = [workers.submit(go.wait, "flood")]
    futures += [workers.submit(lambda: order.append("flood"), "flood") for _ in range(20)]
    futures += [workers.submit(lambda: order.append("quiet"), "quiet") for _ in range(2)]
    go.set()
    for future in futures:
        future.result(10)
    workers.stop()
    assert workers.join(60)
    assert order.index("quiet") <= 1
    assert [index for index, name in enumerate(order) if name == "quiet"][1] <= 3


def test_stopped_threads_cancel_what_waits():
    workers, go, started = Workers(1, "turns"), threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go.wait(60)

    running = workers.submit(wait, "a")
    assert started.wait(60)
    waiting = workers.submit(lambda: None, "b")
    workers.stop()
    assert waiting.cancelled()
    assert not workers.join(0.0)
    go.set()
    assert workers.join(60)
    assert running.done()
