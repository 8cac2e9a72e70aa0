"""Parts of an engine evict by themselves, and a hit needs the rows of all parts."""

import pytest

from benchmarks.parted_engine import Replay
from benchmarks.parts import WAYS, relays_of_long_prompt
from testing.workloads.requests import agents

NUM_ROWS = 500


@pytest.fixture(scope="module")
def workload():
    return agents(1, 0.03)


@pytest.mark.parametrize("num_engine_rows", [0, NUM_ROWS // 4])
def test_two_parts_hit_what_the_first_part_has(workload, num_engine_rows):
    """The tiers evict rows, and the calls of both parts have the same order."""
    joint = Replay(workload, NUM_ROWS, WAYS["same order"], num_engine_rows).run()
    assert 0 < joint.hit_rows < joint.rows
    assert (joint.hit_rows, joint.failed_loads, joint.waits) == (joint.first_part_rows, 0, [])


def test_requests_wait_for_one_answer_after_the_engine_restarted(workload):
    joint = Replay(workload, NUM_ROWS, WAYS["engine restarts"]).run()
    assert joint.hit_rows == joint.first_part_rows
    assert set(joint.waits) == {1}


def test_relays_of_a_long_prompt_fit_into_one_message():
    (num_bytes,) = relays_of_long_prompt(num_groups=3)
    assert num_bytes <= 64 << 10
