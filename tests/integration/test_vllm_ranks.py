"""Ranks of one engine never disagree on a hit: if one rank lacks a chunk, all ranks compute it. Ranks that
step together never wait for each other's copies.

The cases are tensor and pipeline parallelism, and ranks that hold the same KV: latents, and fewer KV heads
than ranks. All ranks run in one process, each with its own KV, runner hooks and worker side. Their reports
go through vLLM's own aggregator.
"""

import queue
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lmcache_client.core.copier import CpuCopier
from lmcache_store.common.timing import TIMING
from tests.harness.client.fake_model import answer
from tests.harness.sim.config import BLOCK, CHUNK, SimGroup, SimSettings
from tests.harness.sim.world import Gate, assert_idle, make_tokens, only_engine, serving_world

pytestmark = pytest.mark.vllm

SHAPES = {
    "tensor": SimSettings(tensor_parallel=2),
    "latents": SimSettings(groups=(SimGroup("mla"),), tensor_parallel=4, num_kv_heads=1),
    "fewer-heads": SimSettings(tensor_parallel=4, num_kv_heads=2),
    "pipeline": SimSettings(pipeline_parallel=2),
    "latents-in-stages": SimSettings(
        groups=(SimGroup("mla"),), tensor_parallel=2, num_kv_heads=1, pipeline_parallel=2
    ),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=list(SHAPES))
def world(request):
    with serving_world(request.param) as world:
        yield world


class OneRank:
    """Copies of one rank of an engine, which pass a gate of their own and can be made to fail."""

    def __init__(self, monkeypatch, rank) -> None:
        self.gate = Gate()
        self.error: Exception | None = None
        self._is_of_rank = lambda copier: copier is rank.worker._worker._copier
        for name in ("load", "store"):
            monkeypatch.setattr(CpuCopier, name, self._held_back(getattr(CpuCopier, name)))

    def _held_back(self, copy):
        gated = self.gate.gated(copy)

        def copy_or_fail(copier, *args):
            if not self._is_of_rank(copier):
                return copy(copier, *args)
            if self.error is not None:
                raise self.error
            return gated(copier, *args)

        return copy_or_fail


@pytest.mark.parametrize("runner", [1, 2])
def test_loaded_kv_equals_computed_kv(world, runner):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(replace(world.settings, runner=runner)) as (engine,):
        for num_cached in (0, 5 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)


def test_ranks_with_the_same_kv_store_it_once(world):
    settings = world.settings
    with world.engines(settings) as (engine,):
        columns = {rank.worker._worker.identity.hello.column for rank in engine.ranks}
        owners = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica]
        engine_kv_bytes = world.sidecar.stats()["lookups"]["engine_kv_bytes"]
    assert engine_kv_bytes == sum(rank.pages.nbytes for rank in owners), "replicas must not be counted"
    num_shards = settings.tensor_parallel // settings.replicas
    assert len(columns) == len(owners) == num_shards * settings.pipeline_parallel


def test_row_is_not_found_before_all_ranks_have_stored_it(world, monkeypatch):
    prompt = make_tokens(2 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        last_owner = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica][-1]
        copies_of_last = OneRank(monkeypatch, last_owner)
        copies_of_last.gate.shut()
        name = engine.add(prompt, max_tokens=5)
        engine.run(name)
        copies_of_last.gate.wait_arrived()
        with world.engines(world.settings) as (other,):
            name = other.add(prompt)
            other.run(name)
            assert other.results[name].num_cached_tokens == 0
        copies_of_last.gate.open()
        assert_idle(engine)


def test_all_ranks_compute_when_the_load_of_one_rank_fails(world, monkeypatch):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        for rank in (engine.ranks[0], engine.ranks[-1]):
            with monkeypatch.context() as patch:
                OneRank(patch, rank).error = OSError("its memory is unavailable")
                name = engine.add(prompt, max_tokens=20)
                assert_idle(engine)
            assert engine.results[name].tokens == answer(prompt, 20)
            assert engine.results[name].num_cached_tokens < 5 * CHUNK


def test_ranks_wait_for_the_slowest_load(world, monkeypatch):
    """The other ranks keep all their blocks while they wait for it."""
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        copies_of_last = OneRank(monkeypatch, engine.ranks[-1])
        copies_of_last.gate.shut()
        name = engine.add(prompt, max_tokens=20)
        while not copies_of_last.gate.num_waiting:
            engine.step()
        competitors = [engine.add(make_tokens(2 * CHUNK), max_tokens=4) for _ in range(4)]
        engine.run(*competitors)
        assert engine.results[name].finish_reason is None
        copies_of_last.gate.open()
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 5 * CHUNK
        assert engine.results[name].tokens == answer(prompt, 20)


def test_all_ranks_compute_when_one_rank_is_not_attached(world):
    """The rank cannot load the chunks of the other ranks."""
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        engine.ranks[-1].worker._worker.go_offline()
        for _ in range(2):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == 0
            assert engine.results[name].tokens == answer(prompt, 20)


@contextmanager
def unattached(*ranks):
    """Ranks that have not attached yet, while the other ranks and the scheduler know their identity."""
    with pytest.MonkeyPatch.context() as patch:
        for rank in ranks:
            for name in ("identity", "_client"):
                patch.setattr(rank.worker._worker, name, None)
        yield


WINDOWS = {
    "windows": SimSettings(groups=(SimGroup("full"), SimGroup("window", 50)), tensor_parallel=2),
    "window": SimSettings(groups=(SimGroup("window", 50),), tensor_parallel=2),
}


@pytest.mark.parametrize("settings", [*SHAPES.values(), *WINDOWS.values()], ids=[*SHAPES, *WINDOWS])
def test_all_ranks_compute_until_the_last_rank_attaches(settings):
    """An engine returns to a sidecar that holds its KV: its first requests find one rank not attached."""
    prompt = make_tokens(5 * CHUNK + 10)
    with only_engine(settings) as (_, engine):
        engine.add(prompt)
        assert_idle(engine)
        with unattached(engine.ranks[-1]):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 0
        assert engine.results[name].tokens == answer(prompt, 20)


def test_blocks_are_held_for_storing_ranks_while_others_are_not_attached(world, monkeypatch):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        owners = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica]
        with unattached(*(rank for rank in engine.ranks if rank not in owners)):
            copies_of_last = OneRank(monkeypatch, owners[-1])
            copies_of_last.gate.shut()
            name = engine.add(prompt, max_tokens=5)
            engine.run(name)
            copies_of_last.gate.wait_arrived()
            engine.step()
            (state,) = engine.scheduler.connector._scheduler._states.values()
            assert state.num_stores, "a copy reads the request's blocks"
            copies_of_last.gate.open()
            assert_idle(engine)


STEP_SECONDS = 0.02


def record_waits(monkeypatch):
    """Record the seconds for which this thread would wait for others. Waits with a limit pass at once."""
    engine, waits, wait = threading.current_thread(), [], threading.Event.wait

    def passing(event, timeout=None):
        if timeout is None or threading.current_thread() is not engine or event.is_set():
            return wait(event, timeout)
        waits.append(timeout)
        return False

    class Queue(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            if timeout is None or threading.current_thread() is not engine:
                return super().get(block, timeout)
            if self.empty():
                waits.append(timeout)
            return self.get_nowait()

    monkeypatch.setattr(threading.Event, "wait", passing)
    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    return waits


@pytest.mark.parametrize("runner", [1, 2])
def test_load_of_one_rank_delays_no_token_of_a_rank_that_steps_with_it(runner, monkeypatch):
    """A token of data-parallel ranks of a mixture-of-experts model takes as long as the slowest rank."""
    waits, prompt = record_waits(monkeypatch), make_tokens(4 * CHUNK + 1)
    settings = SimSettings(runner=runner, steps_together=True)
    with serving_world(settings) as world, world.engines(settings, settings) as ranks:
        busy, loading = ranks
        loading.serve(prompt)
        busy.add(make_tokens(1), max_tokens=100)

        def seconds(rank):
            num_waits = len(waits)
            rank.step()
            return STEP_SECONDS + sum(waits[num_waits:])

        def token_gap():
            return max(seconds(rank) for rank in ranks)

        alone = [token_gap() for _ in range(20)]
        world.load_gate.shut()
        name = loading.add(prompt)
        begin = token_gap()
        world.load_gate.wait_arrived()
        during_load = [begin, *(token_gap() for _ in range(20))]
        assert world.load_gate.num_waiting, "the load is still running"
        world.load_gate.open()
        for rank in ranks:
            assert_idle(rank)
        assert loading.results[name].num_cached_tokens == 4 * CHUNK
        assert max(during_load) <= 1.05 * max(alone), "the busy rank waited for the load of the other rank"


@pytest.mark.parametrize(("retention", "num_cached"), [(0, 0), (CHUNK, 2 * CHUNK)])
def test_windows_that_vllm_retains_are_stored_without_waits(retention, num_cached, monkeypatch):
    """vLLM reuses other blocks behind a window at once, so copies of them are dropped."""
    settings = SimSettings(
        groups=(SimGroup(), SimGroup("window", 2 * BLOCK)),
        num_blocks=256,
        has_prefix_caching=True,
        retention=retention,
        steps_together=True,
    )
    monkeypatch.setattr(TIMING, "hold_seconds", 60.0)
    prompt = make_tokens(8 * CHUNK)
    with serving_world(settings) as world, world.engines(settings) as (engine,):
        world.store_gate.shut()
        engine.run(engine.add(prompt))
        world.store_gate.open()
        assert_idle(engine)
        name = engine.serve(prompt[: 2 * CHUNK + 1])
        assert engine.results[name].num_cached_tokens == num_cached
