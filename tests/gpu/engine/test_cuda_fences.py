"""Copies that don't wait for the engine's work are seen: the harness would not miss them.

On the simulated GPU only, whose kernels can be held back; see ``tests/harness/sim_device.py``.
"""

from __future__ import annotations

import os

import pytest

from lmcache.cuda.driver import Stream
from lmcache.engines.core.cuda_copier import CudaCopier
from testing.child_process import wait_until
from tests.harness.sim_config import CHUNK, SimSettings
from tests.harness.sim_world import assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif("CUDASIM_NODE" not in os.environ, reason="this is no simulated driver"),
]

SETTINGS = SimSettings()


@pytest.fixture
def hasty(monkeypatch):
    """Nothing waits for a fence any more: not on the GPU and not on the host."""

    def begin():
        monkeypatch.setattr(CudaCopier, "wait", lambda *_: None)
        monkeypatch.setattr(Stream, "wait", lambda *_: None)

    yield begin
    monkeypatch.undo()


def step_behind_the_copies(engine):
    """Each step comes when the copies of the last one ended, which they could not if they waited for it."""
    worker = engine.worker._worker
    while engine.scheduler.has_requests():
        engine.step()
        wait_until(
            lambda: all(transfer.ended.is_set() for transfer in worker._stores.values()),
            timeout=60,
            what="the stores have ended",
        )
        loads = worker._loader.submit(lambda: None)
        loads.result(60)


def test_a_store_that_does_not_wait_is_seen(world, hasty):
    prompt = make_tokens(3 * CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        hasty()
        engine.add(prompt)
        step_behind_the_copies(engine)
        engine.run()
    with pytest.raises(AssertionError, match="committed under a wrong name"):
        world.audit(SETTINGS, [prompt])


def test_a_load_that_does_not_wait_is_seen(world, hasty):
    prompt = make_tokens(3 * CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        hasty()
        engine.add(prompt)
        step_behind_the_copies(engine)
        engine.run()
        assert engine.wrong_reads
