"""Whatever happens in whatever order, all KV that is read and all that is committed is what its tokens say.

Two engines of any shape on one sidecar; requests arrive, share prefixes, are aborted and preempted, copies
are held back, the sidecar stands still, and drafts are right or wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.sim_config import SimSettings
from tests.harness.sim_scenario import Scenario, events
from tests.harness.sim_world import world

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


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # other threads do
@settings(max_examples=70, suppress_health_check=list(HealthCheck))
@given(shape=shapes, other=shapes, happens=st.lists(events, min_size=10, max_size=40))
def test_any_order_of_events(world, shape, other, happens):
    with world.engines(shape, replace(other, num_drafts=shape.num_drafts)) as engines:
        Scenario(world, engines).play(happens)
