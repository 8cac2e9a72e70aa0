"""Random events in random order: all KV that is read or committed matches its tokens.

Two engines of random shapes share one sidecar. Requests arrive, share prefixes, are aborted and preempted,
copies are held back, the sidecar stops, and drafts are right or wrong.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.deadlines import SIMULATED
from tests.harness.scope import examples
from tests.harness.sim.config import SimSettings
from tests.harness.sim.scenario import Scenario, events
from tests.harness.sim.world import world

DEADLINES = SIMULATED

__all__ = ["world"]

pytestmark = pytest.mark.vllm

shapes = st.builds(
    SimSettings,
    runner=st.sampled_from((1, 2)),
    num_drafts=st.sampled_from((0, 3)),
    num_blocks=st.sampled_from((26, 32, 80)),
    has_prefix_caching=st.booleans(),
    is_async=st.booleans(),
    max_num_seqs=st.sampled_from((2, 4)),
    max_num_batched_tokens=st.sampled_from((64, 160)),
)


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # other threads use it
@settings(max_examples=examples(70), suppress_health_check=list(HealthCheck))
@given(first=shapes, second=shapes, steps=st.lists(events, min_size=10, max_size=40))
def test_tokens_are_right_for_any_order_of_events(world, first, second, steps):
    with world.engines(first, replace(second, num_drafts=first.num_drafts)) as engines:
        Scenario(world, engines).play(steps)
