"""Ends of prompts that are being blended: aborts, resets, failures, and a side that goes offline."""

import logging

import pytest

from lmcache_client.vllm.blend.scheduler import MAX_FAILURES
from tests.harness.client.blend_rig import document, prompt
from tests.harness.client.scheduler_rig import blocks


@pytest.mark.parametrize("phase", ["placing", "slices"])
def test_aborted_prompt_is_dropped_once_and_its_leases_end(rig, phase):
    request, _ = rig.blending()
    if phase == "slices":
        rig.report_blends(placed=["r"])
        rig.step()
    assert rig.finish(request) is False, "vLLM itself waits for the load"
    assert rig.leases() == {"r"}
    step = rig.step().blend
    assert (step.dropped, step.ready, step.max_tokens) == (["r"], [], 0)
    rig.report_blends(placed=["r"] if phase == "placing" else [])
    assert rig.step().blend is None
    rig.report_blends(failed=["r"], received=["r"])
    assert rig.leases() == set()
    assert rig.scheduler._num_failures == 0
    assert rig.scheduler._jobs == rig.scheduler._states == {}


def test_prompt_that_becomes_ready_and_is_aborted_in_the_same_step_is_only_dropped(rig):
    request, _ = rig.blending()
    rig.report_blends(placed=["r"])
    rig.finish(request)
    step = rig.step().blend
    assert (step.dropped, step.ready, step.max_tokens) == (["r"], [], 0)


def test_reset_drops_the_prompt_and_its_engine_computes_it(rig):
    request, _ = rig.blending()
    rig.scheduler.note_change("new weights")
    assert rig.step().blend.dropped == ["r"]
    rig.report_blends(failed=["r"], received=["r"])
    assert rig.match(request) == (0, False)
    assert rig.leases() == set()


def test_reset_between_offer_and_allocation_fails_the_load(rig):
    for number in (1, 2):
        rig.store_rows(document(number))
    request, (num_tokens, _) = rig.ask(prompt(2, 1))
    rig.scheduler.note_change("new weights")
    rig.allocate(request, blocks(14), num_tokens)
    meta = rig.step()
    assert meta.blend is None
    assert [(load.request_id, load.pieces()) for load in meta.loads] == [("r", [])]


def test_prompt_of_which_the_engine_loads_only_a_part_is_not_blended(rig):
    for number in (1, 2):
        rig.store_rows(document(number))
    request, (num_tokens, _) = rig.ask(prompt(2, 1))
    rig.allocate(request, blocks(13), num_tokens - 32)
    meta = rig.step()
    assert meta.blend is None
    assert [(load.request_id, load.pieces()) for load in meta.loads] == [("r", [])]
    rig.report_blends(failed=["r"], received=["r"])
    assert rig.leases() == set()


def test_adapter_load_drops_the_prompts_that_it_affects(rig):
    request, _ = rig.blending()
    rig.scheduler.forget(lambda request: request.request_id == "r")
    assert rig.step().blend.dropped == ["r"]
    assert rig.leases() == set()
    rig.scheduler.forget(lambda request: True)
    rig.report_blends(failed=["r"], received=["r"])
    assert rig.step().blend is None
    rig.finish(request)
    assert rig.scheduler._jobs == rig.scheduler._asked == {}


def test_offline_side_drops_the_prompt_that_runs(rig):
    rig.blending()
    rig.scheduler.go_offline()
    assert rig.step().blend.dropped == ["r"]
    assert rig.step().blend is None


@pytest.mark.parametrize("num_cached", [0, 416], ids=["blended", "from the engine's cache"])
def test_answer_of_a_blended_prompt_says_so_after_the_side_went_offline(rig, num_cached):
    if num_cached:
        request, _ = rig.ask(prompt(2, 1), computed=num_cached)
        rig.allocate(request, blocks(14), 0)
    else:
        request, _ = rig.blending()
        rig.report_blends(blended=["r"], received=["r"])
    rig.scheduler.go_offline()
    (answer,) = rig.scheduler.hand_over(request).values()
    assert answer["blended"]["tokens" if not num_cached else "cached"]
    rig.finish(request)
    assert rig.scheduler._asked == {}


def test_answer_that_began_after_blended_blocks_says_so_after_a_preemption(rig):
    """The request is then computed from its first token, but its first answered tokens remain."""
    request, _ = rig.ask(prompt(2, 1), computed=416)
    rig.allocate(request, blocks(14), 0)
    rig.step(new=[("r", blocks(14), 416, 4)])
    rig.step(preempted=["r"])
    rig.match(request)
    rig.drain_lookups()
    assert rig.match(request) == (0, False)
    assert rig.scheduler.hand_over(request)["lmcache"]["blended"]["cached"] == 416


@pytest.mark.parametrize("num_cached", [0, 64])
def test_exception_in_the_step_of_the_claim_fails_the_load(rig, num_cached):
    """vLLM waits for the load, so the workers must report it. Other requests may share the cached blocks."""
    for number in (1, 2):
        rig.store_rows(document(number))
    request, (num_tokens, _) = rig.ask(prompt(2, 1), computed=num_cached)
    rig.allocate(request, blocks(14), num_tokens)

    def raise_error(meta):
        raise RuntimeError("a test")

    rig.scheduler._complete = raise_error
    with pytest.raises(RuntimeError):
        rig.step()
    rig.scheduler.go_offline()
    meta = rig.step()
    assert (meta.blend.jobs, meta.blend.dropped) == ([], [])
    (load,) = meta.loads
    failed = tuple(blocks(14)[num_cached // 32 :])
    assert (load.request_id, load.blocks, load.pieces()) == ("r", failed, [])


def test_side_stops_blending_after_failures_and_says_so_once(rig, caplog):
    for number in range(MAX_FAILURES + 1):
        name = f"r{number}"
        if number == MAX_FAILURES - 1:
            waiting, _ = rig.ask(prompt(2, 1), "waiting")
        if number < MAX_FAILURES:
            request, _ = rig.blending(name)
            rig.report_blends(failed=[name])
            assert rig.step().blend.dropped == [name], "ranks that have not failed must end, too"
            rig.report_blends(failed=[name], received=[name])
            assert rig.match(request) == (0, False), "it starts again without a load"
            rig.finish(request)
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(
        "LMCache Cluster blends no more prompts in this process, because 3 of them failed"
    )
    assert "request r2" in message
    assert rig.match(waiting) == (192, True), "the exact KV of the first document"
    late, offer = rig.ask(prompt(2, 1), "late")
    assert (late.cache_salt, offer) == (None, (192, True))
    assert rig.leases() == set()


def test_paused_engine_runs_until_its_prompts_are_blended(rig):
    rig.blending()
    rig.scheduler.free_blocks = lambda request: None
    assert rig.scheduler.has_loads_to_await()
    rig.report_blends(placed=["r"])
    assert rig.step().blend.max_tokens == 1000
    rig.report_blends(blended=["r"], received=["r"])
    assert not rig.scheduler.has_loads_to_await()


def test_leases_of_documents_end_when_all_ranks_have_placed_their_rows(make_rig):
    """Slices may take seconds next to other requests, and leased rows can't be evicted."""
    rig = make_rig(num_ranks=2)
    rig.blending()
    rig.report_blends(placed=["r"])
    assert rig.leases() == {"r", "r#1"}, "the other rank still reads the rows"
    rig.report_blends(placed=["r"])
    assert rig.leases() == {"r"}
