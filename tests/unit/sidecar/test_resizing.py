"""Conditions that a shrinking memory tier waits for, separately. ``test_resizing_model`` combines them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_sidecar.config import Config
from lmcache_sidecar.pages.stats import document
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.sidecar import Sidecar
from testing.child_process import wait_until
from tests.harness.sidecar.in_process import run_sidecar
from tests.harness.sidecar.resizing_worker import CAPACITY, SIZES, Worker
from tests.unit.sidecar.test_resizing_model import ResizingModel


class FixedWorker:
    """Replaces hypothesis' data, and always draws the given worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def draw(self, _: object) -> Worker:
        return self.worker


class Scenario(ResizingModel):
    """A full arena, and two workers that have pinned all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.workers
        self.run_workers()
        self.fill(FixedWorker(self.first))
        assert self.arena.ready_rows == self.arena.num_rows

    def run_workers(self) -> None:
        for worker in self.workers:
            for _ in range(4):
                if worker.is_attached:
                    worker.work()

    def shrink(self) -> None:
        self.request_size(SIZES[0])

    def assert_waits(self, reason: str) -> None:
        assert reason in self.resizer.problem
        assert self.arena.size_bytes > self.size.num_bytes
        assert not self.faults

    def assert_done(self) -> None:
        self.step()
        assert (self.resizer.problem, self.arena.size_bytes) == ("", self.size.num_bytes)
        assert not self.faults


@pytest.fixture
def scenario() -> Iterator[Scenario]:
    scenario = Scenario()
    yield scenario
    scenario.teardown()


def begin_load(scenario: Scenario) -> None:
    scenario.begin_load(FixedWorker(scenario.second))


def begin_load_and_reattach(scenario: Scenario) -> None:
    begin_load(scenario)
    scenario.second.attach()


@pytest.mark.parametrize(
    ("begin", "reason", "end"),
    [
        pytest.param(Scenario.lease, "in use: 1 leased", Scenario.release, id="leased rows"),
        pytest.param(begin_load, "not yet released by", lambda s: s.end_load(s.second), id="a load"),
        pytest.param(
            begin_load_and_reattach, "not yet released by", lambda s: s.end_load(s.second), id="old pins"
        ),
        pytest.param(lambda s: s.second.lose(), "not proven dead", lambda s: s.second.die(), id="lost"),
    ],
)
def test_shrinking_waits_for_all_users_of_the_memory(scenario, begin, reason, end):
    begin(scenario)
    scenario.shrink()
    scenario.run_workers()
    scenario.step()
    scenario.assert_waits(reason)
    end(scenario)
    scenario.step()
    scenario.run_workers()
    scenario.assert_done()
    assert not any(worker.older_devices for worker in scenario.workers)


def test_shrinking_waits_for_a_frozen_worker_and_ignores_its_answer_to_an_earlier_round(scenario):
    scenario.shrink()
    scenario.run_workers()
    scenario.request_size(CAPACITY)
    scenario.run_workers()
    scenario.shrink()
    scenario.first.work()
    scenario.step()
    scenario.assert_waits("(attached)")
    scenario.run_workers()
    scenario.assert_done()


def test_growth_during_a_shrink_waits_for_the_workers(scenario):
    scenario.shrink()
    scenario.first.work()
    scenario.request_size(SIZES[1])
    assert scenario.arena.ready_rows == scenario.arena.rows_within(SIZES[1])
    scenario.assert_waits("is not yet released by")
    scenario.run_workers()
    scenario.assert_done()


BUG = "resizing failed and is retried; this is a bug, see the sidecar's log: ValueError('a bug')"


def memory_of(sidecar: Sidecar) -> dict[str, Any]:
    memory: dict[str, Any] = document(sidecar.stats())["memory"]
    return memory


def test_unexpected_error_is_reported_and_retried(tmp_path, monkeypatch, caplog):
    step, bugs = Resizer.step, [ValueError("a bug")]

    def failing_step(resizer: Resizer) -> bool:
        if bugs:
            raise bugs[0]
        return step(resizer)

    async def use(sidecar: Sidecar) -> None:
        await asyncio.to_thread(wait_until, lambda: memory_of(sidecar)["resize_problem"] == BUG, timeout=60)
        bugs.clear()
        await asyncio.to_thread(wait_until, lambda: not memory_of(sidecar)["resize_problem"], timeout=60)

    monkeypatch.setattr(Resizer, "step", failing_step)
    run_sidecar(Config(socket=str(tmp_path / "socket"), memory_size=8 << 20, http_port=0), use)
    assert caplog.text.count("Traceback") == 1


def test_size_above_the_volume_is_refused(tmp_path, monkeypatch):
    """The sidecar keeps the previous size, and a restarted sidecar starts."""
    size_file = tmp_path / "memory-size"
    config = Config(
        socket=str(tmp_path / "socket"), memory_size=8 << 20, memory_max_size=64 << 20,
        memory_size_file=str(size_file), http_port=0,
    )  # fmt: skip

    async def read(sidecar: Sidecar) -> tuple[int, str]:
        return memory_of(sidecar)["target_bytes"], memory_of(sidecar)["resize_problem"]

    monkeypatch.setattr("lmcache_sidecar.sidecar.volume_bytes", lambda path: 24 << 20)
    size_file.write_text("32Mi")
    num_bytes, problem = run_sidecar(config, read)
    assert num_bytes == 8 << 20
    assert problem.endswith("increase --memory-max-size and the arena's volume, then restart it")
    size_file.write_text("24Mi")
    assert run_sidecar(config, read) == (24 << 20, "")
