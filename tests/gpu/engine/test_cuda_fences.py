"""Control experiments: copies that ignore the engine's fences are detected by the harness.

They need the simulated GPU, whose kernels can be held back. See ``tests/harness/sim/device.py``.
"""

import pytest

from lmcache_client.core.cuda_copier import CudaCopier
from lmcache_client.cuda.driver import GpuStream
from testing.child_process import wait_until
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

SETTINGS = SimSettings()


def wait_pinned(engine):
    """Wait until the arena is pinned: copies of other memory wait for their fence in another way."""
    assert engine.worker._worker._copier.pins.wait(60)


@pytest.fixture
def ignore_fences(monkeypatch):
    """A function after which nothing waits for a fence, neither on the GPU nor on the host."""

    def begin():
        monkeypatch.setattr(CudaCopier, "wait", lambda *_: None)
        monkeypatch.setattr(GpuStream, "wait", lambda *_: None)

    yield begin
    monkeypatch.undo()


def step_after_copies(engine):
    """Run each step after the copies of the previous step, which end only if they ignore their fences."""
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


def test_store_that_ignores_its_fence_is_detected(world, ignore_fences):
    prompt = make_tokens(3 * CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        wait_pinned(engine)
        ignore_fences()
        engine.add(prompt)
        step_after_copies(engine)
        engine.run()
    with pytest.raises(AssertionError, match="committed under a wrong name"):
        world.audit(SETTINGS, [prompt])


def test_load_that_ignores_its_fence_is_detected(world, ignore_fences):
    prompt = make_tokens(3 * CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        engine.add(prompt)
        assert_idle(engine)
        wait_pinned(engine)
        ignore_fences()
        engine.add(prompt)
        step_after_copies(engine)
        engine.run()
        assert engine.wrong_reads
