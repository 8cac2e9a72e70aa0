"""What a sidecar without lower tiers counts, though engines read its index without asking it."""

import pytest

from tests.harness.sim_config import CHUNK, SimSettings
from tests.harness.sim_world import assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

NUM_CHUNKS = 4


def test_hits_and_misses_are_counted_once_for_each_request(world):
    prompt = make_tokens(NUM_CHUNKS * CHUNK + 1)
    with world.engines(SimSettings(num_blocks=256)) as (engine,):
        before = world.sidecar.stats()["memory"]
        for _ in range(3):
            engine.add(prompt)
            assert_idle(engine)

    def counted(stats, name: str) -> int:
        return stats["memory"][name] - before[name]

    world.sidecar.wait_until(
        lambda stats: counted(stats, "misses") == NUM_CHUNKS and counted(stats, "hits") == 2 * NUM_CHUNKS
    )
