"""What a shrinking memory tier waits for, one thing at a time; ``test_resizing_model`` mixes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from lmcache_sidecar.config import Config
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.sidecar import Sidecar
from lmcache_sidecar.stats import CallStats, document

from testing.child_process import wait_until
from tests.unit.sidecar.test_resizing_model import CAPACITY, SIZES, ResizingModel, Worker, name


class First:
    """In place of what hypothesis would draw."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def draw(self, _: object) -> Worker:
        return self.worker


class Scenario(ResizingModel):
    """Two workers that have all of a full arena pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.workers
        self.everybody_works()
        self.fill(First(self.first))
        assert self.arena.ready_rows == self.arena.num_rows

    def everybody_works(self) -> None:
        for worker in self.workers:
            for _ in range(4):
                if worker.is_attached:
                    worker.work()

    def shrink(self, num_bytes: int = SIZES[0]) -> None:
        self.ask(num_bytes)

    def assert_waits(self, why: str) -> None:
        assert why in self.resizer.problem
        assert self.arena.size_bytes > self.size.num_bytes
        assert not self.faults

    def assert_is_done(self) -> None:
        self.step()
        assert self.resizer.problem == ""
        assert self.arena.size_bytes == self.size.num_bytes
        assert not self.faults


@pytest.fixture
def scenario() -> Iterator[Scenario]:
    scenario = Scenario()
    yield scenario
    scenario.teardown()


def test_rows_that_are_leased(scenario):
    scenario.lease()
    scenario.shrink()
    scenario.everybody_works()
    scenario.step()
    scenario.assert_waits("in use: 1 leased")
    scenario.release()
    scenario.step()
    scenario.everybody_works()
    scenario.assert_is_done()


def test_rows_in_use_are_shown_again_when_they_stay(scenario):
    last, key = scenario.last_row()
    scenario.lease()
    scenario.shrink()
    scenario.assert_waits("in use: 1 leased")
    scenario.release()
    scenario.ask(CAPACITY)
    assert scenario.memory._rows.find(name(key)) == last.row
    scenario.what_is_found_is_shown_to_engines()


def test_nothing_beyond_is_given_out_meanwhile(scenario):
    scenario.lease()
    scenario.shrink()
    scenario.fill(First(scenario.first))
    assert scenario.memory.usable_slots <= scenario.arena.rows_within(SIZES[0])
    scenario.step()
    scenario.assert_waits("in use: 1 leased")


def test_copies_that_began_before(scenario):
    scenario.begin_load(First(scenario.second))
    scenario.shrink()
    scenario.everybody_works()
    scenario.step()
    scenario.assert_waits("to let go of it")
    scenario.end_load(scenario.second)
    scenario.everybody_works()
    scenario.assert_is_done()


def test_a_worker_that_is_frozen(scenario):
    scenario.shrink()
    scenario.first.work()
    scenario.step()
    scenario.assert_waits("attached, to let go of it")
    scenario.everybody_works()
    scenario.assert_is_done()


def test_a_worker_that_is_lost_until_it_is_dead(scenario):
    scenario.shrink()
    scenario.second.lose()
    scenario.everybody_works()
    scenario.step()
    scenario.assert_waits("lost, and not proven dead, to let go of it")
    scenario.second.die()
    scenario.assert_is_done()


def test_a_worker_that_attaches_again_with_the_pins_of_before(scenario):
    scenario.begin_load(First(scenario.second))
    scenario.second.attach()
    scenario.shrink()
    scenario.everybody_works()
    scenario.step()
    scenario.assert_waits("to let go of it")
    scenario.end_load(scenario.second)
    scenario.everybody_works()
    scenario.assert_is_done()
    assert not scenario.second.older


def test_workers_of_before_a_restart(scenario):
    scenario.shrink()
    scenario.restart()
    scenario.step()
    assert scenario.resizer.problem
    assert not scenario.faults
    for worker in scenario.workers:
        worker.attach()
        scenario.step()
    scenario.everybody_works()
    scenario.step()
    scenario.everybody_works()
    scenario.assert_is_done()


def test_an_answer_of_another_round(scenario):
    scenario.shrink()
    scenario.everybody_works()
    scenario.ask(CAPACITY)
    scenario.everybody_works()
    scenario.shrink()
    scenario.step()
    scenario.assert_waits("attached, to let go of it")
    scenario.everybody_works()
    scenario.assert_is_done()


def test_one_that_is_to_grow_meanwhile(scenario):
    scenario.shrink()
    scenario.first.work()
    scenario.ask(SIZES[1])
    assert scenario.arena.ready_rows == scenario.arena.rows_within(SIZES[1])
    scenario.assert_waits("to let go of it")
    scenario.everybody_works()
    scenario.assert_is_done()


BUG = "the sidecar has a bug, see its log, and tries again: ValueError('a bug')"


def test_an_error_that_nobody_expects_is_told_and_not_the_end(tmp_path, monkeypatch, caplog):
    step, bugs = Resizer.step, [ValueError("a bug")]

    def broken(resizer: Resizer) -> bool:
        if bugs:
            raise bugs[0]
        return step(resizer)

    async def wait_problem(sidecar: Sidecar, text: str) -> None:
        def is_told() -> bool:
            return document(sidecar.stats())["memory"]["resize_problem"] == text

        await asyncio.to_thread(wait_until, is_told, timeout=60)

    async def run() -> None:
        sidecar = Sidecar(
            Config(socket=str(tmp_path / "socket"), memory_size=8 << 20, http_port=0), CallStats()
        )
        await sidecar.start()
        try:
            await wait_problem(sidecar, BUG)
            bugs.clear()
            await wait_problem(sidecar, "")
        finally:
            await sidecar.stop()

    monkeypatch.setattr(Resizer, "step", broken)
    asyncio.run(run())
    assert caplog.text.count("Traceback") == 1


def test_no_more_is_asked_for_than_the_volume_has(tmp_path, monkeypatch):
    """The size of before is kept, and a sidecar that starts anew does start."""
    size = tmp_path / "memory-size"
    config = Config(
        socket=str(tmp_path / "socket"), memory_size=8 << 20, memory_max_size=64 << 20,
        memory_size_file=str(size), http_port=0,
    )  # fmt: skip

    async def run(text: str) -> tuple[int, str]:
        size.write_text(text)
        sidecar = Sidecar(config, CallStats())
        await sidecar.start()
        try:
            memory = document(sidecar.stats())["memory"]
            return memory["target_bytes"], memory["resize_problem"]
        finally:
            await sidecar.stop()

    monkeypatch.setattr("lmcache_sidecar.sidecar.volume_bytes", lambda path: 24 << 20)
    num_bytes, problem = asyncio.run(run("32Mi"))
    assert num_bytes == 8 << 20
    assert problem.endswith("can grow: it takes a larger --memory-max-size, and volume")
    assert asyncio.run(run("24Mi")) == (24 << 20, "")
