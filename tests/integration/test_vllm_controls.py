"""Control experiments: each test breaks one promise of engine or connector, and the simulation detects it."""

import pytest

from tests.harness.client.fake_model import answer
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import make_tokens, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

WRONG = "committed under a wrong name"
SETTINGS = SimSettings(runner=2)


def test_connector_that_ignores_preemptions_is_detected(world, monkeypatch):
    prompts = [make_tokens(4 * CHUNK) for _ in range(4)]
    settings = SimSettings(runner=2, num_blocks=40)
    with world.engines(settings) as (engine,):
        monkeypatch.setattr(engine.worker, "handle_preemptions", lambda meta: None)
        world.store_gate.shut()
        for prompt in prompts:
            engine.add(prompt, max_tokens=200)
        while not engine.num_preemptions:
            engine.step()
        for _ in range(3):
            engine.step()
        world.store_gate.open()
        engine.run()
    with pytest.raises(AssertionError, match=WRONG):
        world.audit(settings, prompts)


def test_reset_that_keeps_old_keys_is_detected(world, monkeypatch):
    prompt = make_tokens(CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        engine.add(prompt)
        engine.run()
        monkeypatch.setattr(engine.scheduler.connector, "reset_cache", lambda: None)
        assert engine.reset(b"new weights")
        name = engine.add(prompt, max_tokens=3)
        engine.run()
        assert engine.wrong_reads
        assert engine.results[name].tokens == answer(prompt, 3, b"new weights")
