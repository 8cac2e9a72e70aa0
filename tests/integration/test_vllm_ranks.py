"""Ranks of one engine never disagree on a hit: what one of them lacks, all of them compute.

Tensor and pipeline parallel, and ranks that hold the same KV: latents, and fewer KV heads than ranks.
Each rank has KV, runner hooks and a worker side of its own in one process; what they report goes through
vLLM's own aggregator.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from lmcache.engines.core.copier import CpuCopier
from testing.processes import SidecarProcess
from tests.harness.fake_model import answer
from tests.harness.sim_config import CHUNK, SimGroup, SimSettings
from tests.harness.sim_world import Gate, SimWorld, assert_idle, make_tokens

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


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def world(request):
    with SidecarProcess(memory_size="64Mi") as sidecar:
        world = SimWorld(sidecar, request.param)
        yield world
        world.close()


class OneRank:
    """Copies of one rank of an engine go through a gate of their own, and may fail."""

    def __init__(self, monkeypatch, rank) -> None:
        self.gate = Gate()
        self.error: Exception | None = None
        self._is_mine = lambda copier: copier is rank.worker._worker._copier
        for name in ("load", "store"):
            monkeypatch.setattr(CpuCopier, name, self._held_back(getattr(CpuCopier, name)))

    def _held_back(self, copy):
        gated = self.gate.gated(copy)

        def copy_or_fail(copier, *args):
            if not self._is_mine(copier):
                return copy(copier, *args)
            if self.error is not None:
                raise self.error
            return gated(copier, *args)

        return copy_or_fail


@pytest.mark.parametrize("runner", [1, 2])
def test_a_hit_is_what_was_computed(world, runner):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(replace(world.settings, runner=runner)) as (engine,):
        for num_cached in (0, 5 * CHUNK):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
            assert engine.results[name].num_cached_tokens == num_cached
            assert engine.results[name].tokens == answer(prompt, 20)


def test_ranks_that_hold_the_same_store_it_once(world):
    settings = world.settings
    with world.engines(settings) as (engine,):
        columns = {rank.worker._worker.identity.hello.column for rank in engine.ranks}
        owners = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica]
        told = world.sidecar.stats()["lookups"]["engine_kv_bytes"]
    assert told == sum(rank.pages.nbytes for rank in owners), "what they hold is one cache"
    num_shards = settings.tensor_parallel // settings.replicas
    assert len(columns) == len(owners) == num_shards * settings.pipeline_parallel


def test_a_row_that_one_rank_has_not_stored_yet_is_nobody_s(world, monkeypatch):
    prompt = make_tokens(2 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        last = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica][-1]
        of_last = OneRank(monkeypatch, last)
        of_last.gate.shut()
        name = engine.add(prompt, max_tokens=5)
        engine.run(name)
        of_last.gate.wait_arrived()
        with world.engines(world.settings) as (other,):
            name = other.add(prompt)
            other.run(name)
            assert other.results[name].num_cached_tokens == 0
        of_last.gate.open()
        assert_idle(engine)


def test_a_rank_whose_load_fails(world, monkeypatch):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        for rank in (engine.ranks[0], engine.ranks[-1]):
            with monkeypatch.context() as patch:
                OneRank(patch, rank).error = OSError("its memory is gone")
                name = engine.add(prompt, max_tokens=20)
                assert_idle(engine)
            assert engine.results[name].tokens == answer(prompt, 20)
            assert engine.results[name].num_cached_tokens < 5 * CHUNK


def test_a_rank_whose_load_takes_longer(world, monkeypatch):
    """The others wait for it with all their blocks."""
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        of_last = OneRank(monkeypatch, engine.ranks[-1])
        of_last.gate.shut()
        name = engine.add(prompt, max_tokens=20)
        while not of_last.gate.num_waiting:
            engine.step()
        others = [engine.add(make_tokens(2 * CHUNK), max_tokens=4) for _ in range(4)]
        engine.run(*others)
        assert engine.results[name].finish_reason is None
        of_last.gate.open()
        assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 5 * CHUNK
        assert engine.results[name].tokens == answer(prompt, 20)


def test_a_rank_that_is_not_attached(world):
    """It can't load what the others can: all compute."""
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
    """Their attaching takes long: the others, and the scheduler, know who they are."""
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
def test_a_rank_that_attaches_later_than_the_others(settings):
    """An engine comes back to a sidecar that has its KV: the first requests find one rank not attached."""
    prompt = make_tokens(5 * CHUNK + 10)
    with (
        SidecarProcess(memory_size="64Mi") as sidecar,
        closing(SimWorld(sidecar, settings)) as world,
        world.engines(settings) as (engine,),
    ):
        engine.add(prompt)
        assert_idle(engine)
        with unattached(engine.ranks[-1]):
            name = engine.add(prompt, max_tokens=20)
            assert_idle(engine)
        assert engine.results[name].num_cached_tokens == 0
        assert engine.results[name].tokens == answer(prompt, 20)


def test_blocks_are_held_for_the_rank_that_stores_while_others_are_not_attached(world, monkeypatch):
    prompt = make_tokens(5 * CHUNK + 10)
    with world.engines(world.settings) as (engine,):
        owners = [rank for rank in engine.ranks if not rank.worker._worker.identity.is_replica]
        with unattached(*(rank for rank in engine.ranks if rank not in owners)):
            of_last = OneRank(monkeypatch, owners[-1])
            of_last.gate.shut()
            name = engine.add(prompt, max_tokens=5)
            engine.run(name)
            of_last.gate.wait_arrived()
            engine.step()
            (state,) = engine.scheduler.connector._scheduler._states.values()
            assert state.num_stores, "a copy reads the request's blocks"
            of_last.gate.open()
            assert_idle(engine)
