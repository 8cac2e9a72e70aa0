"""Resets of the engine's caches: no earlier KV is found, stored or loaded afterwards."""

import re
from types import SimpleNamespace

from lmcache_client.vllm.extra_keys import ExtraKeyFinder
from tests.harness.client.scheduler_rig import IDENTITY, Rig, blocks, chunk_ranges, job_ids, make_request


def test_reset_hides_earlier_rows_and_finds_new_rows(rig):
    rig.session.memory_only = True
    rig.stored(3)
    request_before = rig.arrive(make_request(200, "before"))
    assert rig.match(request_before) == (192, True)
    rig.scheduler.reset_cache()
    assert rig.begin(request_before) == 0, "the reset also applies to earlier requests"
    meta = rig.step(new=[("before", blocks(7), 0, 200)])
    rig.commit(meta, without=[(0, 2)])
    rig.report(ended=job_ids(meta))
    assert rig.match(rig.arrive(make_request(200, "after"))) == (128, True)
    rig.scheduler.reset_cache()
    assert rig.match(rig.arrive(make_request(200, "last"))) == (0, False), "each reset starts a new namespace"


def test_request_running_during_a_reset_stores_no_more_chunks(rig):
    """The KV of such a request belongs to the old weights, at least partly."""
    rig.arrive(make_request(200))
    step_before = rig.step(new=[("r", blocks(7), 0, 100)])
    assert chunk_ranges(step_before) == [(0, 1)]
    rig.scheduler.reset_cache()
    meta = rig.step(cached=[("r", None, 100, 100, False)])
    assert meta.stores == []
    assert meta.reclaimed == job_ids(step_before), "copies in progress must be reclaimed"


def test_a_load_of_old_kv_is_used_but_not_stored_after_a_reset(rig):
    request = rig.loading()
    rig.scheduler.reset_cache()
    rig.report(received=["r"])
    meta = rig.step(new=[("r", blocks(7), 192, 8)])
    assert (meta.stores, rig.finish(request)) == ([], False)


def test_paused_engine_gets_back_the_blocks_of_ended_loads(rig):
    """vLLM asks when it may compute nothing. It cannot reset its caches while a request holds blocks."""
    freed = []
    request, other = rig.loading(), rig.arrive(make_request(200, "other"))
    assert rig.begin(other) == 192
    request.num_computed_tokens = other.num_computed_tokens = 192
    rig.step()
    assert not rig.scheduler.has_loads_to_await(), "vLLM 0.29 has no way to get the blocks"
    rig.scheduler.free_blocks = freed.append
    rig.report(received=["r"])
    assert (rig.scheduler.has_loads_to_await(), freed) == (True, []), "a load still writes to the blocks"
    rig.report(received=["other"])
    assert not rig.scheduler.has_loads_to_await()
    assert (freed, request.num_computed_tokens, other.num_computed_tokens) == ([request, other], 0, 0)
    assert not rig.scheduler.has_loads_to_await()
    assert len(freed) == 2
    assert rig.begin(request) == 0, "vLLM may reserve the blocks of the first load forever"


def test_paused_engine_gets_back_blocks_from_an_offline_side(rig):
    freed = []
    rig.scheduler.free_blocks = freed.append
    request = rig.loading()
    rig.scheduler.go_offline()
    rig.report(received=["r"])
    assert (rig.scheduler.has_loads_to_await(), freed) == (False, [request])


REASON = r"vLLM's caches were reset at .* UTC: private until the engine restarts"


def test_reset_reports_why_kv_is_private_from_then_on(rig):
    rig.computing()
    assert rig.session.private_reason == ""
    rig.scheduler.reset_cache()
    rig.computing(make_request(200, "after"))
    rig.drain_lookups()
    assert re.fullmatch(REASON, rig.session.private_reason)


def test_reset_before_the_first_worker_is_reported():
    rig = Rig(identity="no identity yet")
    rig.scheduler.reset_cache()
    rig.scheduler.adopt([IDENTITY])
    rig.lookups = rig.scheduler._lookups
    rig.computing()
    rig.drain_lookups()
    rig.scheduler.go_offline()
    assert re.fullmatch(REASON, rig.session.private_reason)


def test_reset_that_leaves_the_weights_alone_forgets_nothing_until_they_change(rig):
    rig.session.memory_only = rig.scheduler.are_weights_watched = True
    rig.loading()
    rig.scheduler.reset_cache()
    assert rig.match(rig.arrive(make_request(200, "after"))) == (192, True)
    rig.scheduler.note_change("new weights")
    for name in ("changed", "reset"):
        rig.computing(make_request(200, name))
        rig.drain_lookups()
        assert rig.session.private_reason == "new weights"
        rig.scheduler.reset_cache()


def test_requests_whose_adapter_is_replaced_store_no_more(rig):
    adapters = [SimpleNamespace(lora_int_id=number, lora_path=f"adapter {number}") for number in (1, 2)]
    rig.scheduler._finder = ExtraKeyFinder(0.0)
    for adapter in adapters:
        request = rig.arrive(make_request(200, f"r{adapter.lora_int_id}"))
        request.lora_request = adapter
        rig.begin(request)
    first = rig.step(new=[("r1", blocks(7), 0, 100), ("r2", blocks(7), 0, 100)])
    rig.scheduler.note_adapter(SimpleNamespace(lora_int_id=1, lora_path="another", load_inplace=True))
    meta = rig.step(cached=[(name, None, 100, 100, False) for name in ("r1", "r2")])
    assert [job.request_id for job in meta.stores] == ["r2"]
    assert meta.reclaimed == {job.job_id for job in first.stores if job.request_id == "r1"}
