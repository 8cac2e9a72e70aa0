"""An arena of 8 GiB serves while it is being populated, from the first second and after a restart."""

import pytest

from testing.child_process import wait_until
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import assert_idle, make_tokens, serving_world

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256, max_num_batched_tokens=1024, head_size=64)
NUM_CHUNKS = 16


@pytest.fixture(scope="module")
def large():
    with serving_world(is_large=True, memory_size="8Gi") as world:
        yield world


def test_no_row_is_lost_while_engines_attach_and_the_arena_grows(large):
    early, late = ([make_tokens(NUM_CHUNKS * CHUNK + 1) for _ in range(4)] for _ in range(2))
    with large.engines(SETTINGS) as (engine,):
        for prompt in early:
            engine.add(prompt)
        assert_idle(engine)
    large.sidecar.restart()  # adopts the rows in the arena
    with large.engines(SETTINGS) as (engine,):
        for prompt in late:
            engine.add(prompt)
        assert_idle(engine)

        def all_hit():
            names = [engine.add(prompt) for prompt in early + late]
            assert_idle(engine)
            return all(engine.results[name].num_cached_tokens == NUM_CHUNKS * CHUNK for name in names)

        # Adopted rows are verified on first use, and this model is too fast to wait for that.
        wait_until(all_hit, what="hits of all chunks")
    memory = large.sidecar.stats()["memory"]
    assert memory["capacity_rows"] > 2**16
    assert not any(memory["removed"].values())  # so no adopted row was stored again
