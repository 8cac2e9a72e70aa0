"""Loads that hold blocks while their requests do not run."""

from types import SimpleNamespace

import pytest

from lmcache_client.vllm.scheduler import OpenLoads
from lmcache_store.kv_groups import GroupKind, KVGroup
from tests.harness.client.scheduler_rig import Rig, make_identity, make_request

FULL, WINDOW = KVGroup(0, 32, 4096), KVGroup(1, 32, 4096, 64, GroupKind.SLIDING_WINDOW)

A, B = (SimpleNamespace(request_id=name) for name in "ab")


def test_another_load_waits_until_all_open_loads_could_be_completed():
    loads = OpenLoads(10)
    assert loads.may_begin("a", 11), "a single load may need more than all blocks"
    loads.begin(A, 6)
    assert loads.may_begin("b", 4)
    assert not loads.may_begin("b", 5)
    loads.end("a")  # its blocks are still in use
    assert loads.may_begin("a", 6), "a request does not wait for its own load"
    assert not loads.may_begin("b", 5)
    loads.note_step(["a"], 1)  # vLLM can preempt it from now on
    assert loads.may_begin("b", 5)
    loads.begin(B, 5)
    for request in "ab":
        loads.forget(request)
    assert loads.may_begin("c", 11), "finished requests hold no blocks"


def test_first_request_yields_while_loaded_requests_get_no_step():
    loads = OpenLoads(10)
    loads.begin(A, 5)
    loads.end("a")
    yields = []
    for _ in range(3):
        loads.note_step([], 0)
        yields.append(loads.must_yield("b"))
    assert yields == [True, False, True]
    assert not loads.must_yield("a")
    loads.note_step(["a"], 1)
    assert not loads.must_yield("b")


@pytest.mark.parametrize(
    ("groups", "draft_slots", "num_blocks", "loaded"),
    [
        ((FULL,), 0, 6, (192, True)),
        ((FULL,), 33, 8, (192, True)),
        ((FULL,), 33, 7, (160, True)),
        ((FULL,), 33, 2, (0, False)),
        ((FULL, WINDOW), 33, 6 + 2 + 4, (192, True)),
        ((FULL, WINDOW), 33, 6 + 2 + 3, (0, False)),
    ],
)
def test_load_leaves_blocks_for_drafts(groups, draft_slots, num_blocks, loaded):
    """vLLM would never begin the load otherwise. With a window, a hit ends only where its rows end."""
    rig = Rig(make_identity(*groups), draft_slots=draft_slots)
    rig.scheduler._open_loads.num_blocks = num_blocks
    for group in groups:
        rig.stored(3, group=group.group)
    assert rig.match(rig.arrive(make_request(200))) == loaded
    rig.scheduler.go_offline()
