"""Counters of a sidecar without lower tiers, whose index engines read without a call."""

import threading

import pytest

from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

NUM_CHUNKS = 4


def enqueue(engine, task) -> None:
    """Queue a task for the engine's lookup thread, behind its current work."""
    engine.scheduler.connector._scheduler._lookups._queue.put(task)


@pytest.mark.parametrize("is_late", [False, True], ids=["prompt reports", "late reports"])
def test_hits_and_misses_are_counted_once_for_each_request(world, is_late):
    """A report may arrive after the request's own chunks were stored. They still count as misses."""
    prompt, reported, may_report = make_tokens(NUM_CHUNKS * CHUNK + 1), threading.Event(), threading.Event()
    with world.engines(SimSettings(num_blocks=256)) as (engine,):
        enqueue(engine, reported.set)  # the engine's work until it was attached
        assert reported.wait(60)
        memory_before = world.sidecar.stats()["memory"]
        if is_late:
            enqueue(engine, lambda: may_report.wait(60))
        for _ in range(3):
            engine.add(prompt)
            assert_idle(engine)
        may_report.set()

    def counted(stats, name: str) -> int:
        return stats["memory"][name] - memory_before[name]

    world.sidecar.wait_until(
        lambda stats: counted(stats, "misses") == NUM_CHUNKS and counted(stats, "hits") == 2 * NUM_CHUNKS
    )
