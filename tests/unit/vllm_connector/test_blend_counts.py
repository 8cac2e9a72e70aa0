"""Reports of blended prompts to the sidecar: tokens of documents, and what became of them."""

import pytest

from lmcache_client.core.jobs import WorkerReport
from lmcache_client.core.spans import SpanTracer
from lmcache_client.vllm.blend.documents import key_hashes
from lmcache_store import keys
from tests.harness.client.blend_rig import document, fake_hashes, prompt
from tests.harness.client.scheduler_rig import GRID, blocks
from tests.harness.client.spans import SAMPLED, RecordedSpans, figures
from tests.harness.sidecar.wire import NAMESPACE


def end(rig, request):
    """Compute the last token of a prompt. Returns the times that the sidecar receives."""
    num_tokens = request.num_tokens
    meta = rig.step(new=[(request.request_id, blocks(14), num_tokens - 1, 1)])
    rig.scheduler.take_report(WorkerReport(timed_step=meta.timed_step))
    rig.lookups._queue.put(rig.lookups._send_times)
    rig.drain_lookups()
    return rig.session.times[-1]


def scheduled(rig):
    rig.step(new=[("other", [1], 0, 1)])
    rig.drain_lookups()
    ((request_id, _, counts),) = rig.session.scheduled
    assert request_id == "r"
    return counts


@pytest.mark.parametrize(
    ("computed", "num_loaded", "num_blended", "reused"),
    [
        pytest.param(0, 192, 192, 300 - 192, id="the first document is an exact prefix"),
        pytest.param(64, 128, 192, 300 - 128, id="the engine has a part of it"),
        pytest.param(224, 0, 168, 300, id="the engine has a part of the second one"),
    ],
)
def test_claim_and_result_are_reported_without_the_exact_prefix(
    rig, computed, num_loaded, num_blended, reused
):
    request, _ = rig.blending(computed=computed)
    counts = scheduled(rig)
    assert (counts.num_engine_tokens, counts.num_prompt_tokens) == (computed, 420)
    assert (counts.num_loaded_tokens, counts.num_blended_tokens) == (num_loaded, num_blended)
    assert counts.reports_times
    rig.report_blends(placed=["r"])
    rig.now = 3.0
    rig.report_blends(blended=["r"], received=["r"])
    times = end(rig, request)
    assert (times.num_blended_tokens, times.num_recomputed_tokens, times.num_failed_tokens) == (reused, 60, 0)
    assert times.load_seconds == 3.0


@pytest.mark.parametrize(
    ("num_exact", "num_failed"), [(192, 0), (64, 128)], ids=["all but documents is valid", "a row is lost"]
)
def test_failed_blend_reuses_nothing_of_documents(rig, num_exact, num_failed):
    """The rank that did not fail reports its result."""
    request, _ = rig.blending()
    scheduled(rig)
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], failed=["r"], received=["r"])
    rig.allocate(request, blocks(14), 0)  # vLLM does not ask again for a request with valid blocks
    rig.step(new=[("r", blocks(14), num_exact, 100)])
    times = end(rig, request)
    assert (times.num_blended_tokens, times.num_recomputed_tokens, times.num_failed_tokens) == (
        0,
        0,
        num_failed,
    )
    assert len(rig.session.scheduled) == 1
    assert rig.scheduler.hand_over(request) is None


def test_load_of_an_aborted_prompt_has_not_failed(rig):
    """The engine computes none of its tokens. They count as those of any aborted load."""
    request, _ = rig.blending()
    scheduled(rig)
    rig.finish(request)
    rig.step()
    rig.report_blends(failed=["r"], received=["r"])
    rig.lookups._queue.put(rig.lookups._send_times)
    rig.drain_lookups()
    (times,) = rig.session.times
    assert (times.num_blended_tokens, times.num_recomputed_tokens, times.num_failed_tokens) == (192, 0, 0)


def test_exact_requests_report_no_blended_tokens(rig):
    rig.store_rows(prompt(1, 2))
    request, (num_tokens, _) = rig.ask(prompt(1, 2))
    rig.allocate(request, blocks(14), num_tokens)
    assert scheduled(rig).num_blended_tokens == 0


def test_blended_prompt_that_starts_again_is_reported_as_what_it_is_then(rig):
    """A preempted request, whose blocks are all in the engine's own cache."""
    request, _ = rig.blending()
    scheduled(rig)
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], received=["r"])
    end(rig, request)
    rig.step(preempted=["r"])
    assert rig.match(request, 416) == (0, False)
    rig.allocate(request, blocks(14), 0)
    rig.drain_lookups()
    _, (*_, counts) = rig.session.scheduled
    assert (counts.num_engine_tokens, counts.num_loaded_tokens, counts.num_blended_tokens) == (416, 0, 0)
    assert end(rig, request).num_blended_tokens == 0


def test_spans_count_stored_kv_and_not_the_tokens_to_compute(rig):
    recorded = RecordedSpans()
    try:
        rig.scheduler._tracer = SpanTracer(recorded.provider.get_tracer("test"), lambda: rig.now)
        rig.blending(trace_headers=SAMPLED)
        rig.report_blends(placed=["r"])
        rig.report_blends(blended=["r"], received=["r"])
        spans = {span.name: figures(span) for span in recorded.take()}
    finally:
        recorded.close()
    lookup, load = spans["lmcache.lookup"], spans["lmcache.load"]
    assert (lookup["loaded_tokens"], lookup["computed_tokens"]) == (384, 420 - 384)
    assert load == {"loaded_tokens": 384}


def test_steps_with_slices_do_not_measure_the_prefill_rate(rig):
    rig.blending()
    rig.report_blends(placed=["r"])
    meta = rig.step(new=[("other", blocks(10), 0, 300)])
    assert meta.blend.max_tokens
    rig.now = 100.0
    rig.scheduler.take_report(WorkerReport(timed_step=meta.timed_step))
    assert rig.scheduler._rate.tokens_per_second == 0.0
    rig.report_blends(blended=["r"], received=["r"])
    meta = rig.step(new=[("other", blocks(10), 0, 300)])
    rig.now = 101.0
    rig.scheduler.take_report(WorkerReport(timed_step=meta.timed_step))
    assert rig.scheduler._rate.tokens_per_second == 300.0


def test_lookup_of_a_document_names_the_rows_that_the_prompt_uses(rig):
    """The prompt's own rows are those of the first document, and end in the second row of the next one."""
    looked_up, lookup = {}, rig.session.lookup

    def record(request_id, group_keys, *, is_relayed, hint=False, **fields):
        if is_relayed and not hint:
            looked_up[request_id] = group_keys[0][1]
        return lookup(request_id, group_keys, hint=hint, **fields)

    rig.session.lookup = record
    rig.store_rows(prompt(2, 1), 5)
    for number in (1, 3):
        rig.store_rows(document(number))
    request, offer = rig.ask(prompt(2, 1, 3), blend={"documents": [200, 200, 200]})
    rig.allocate(request, blocks(20), offer[0])
    rig.step()
    rig.drain_lookups()
    names = {number: keys.chunk_keys(key_hashes(GRID, fake_hashes(document(number)))) for number in (1, 3)}
    rows = {name: [NAMESPACE + key for key in names[number]] for name, number in (("r#1", 1), ("r#2", 3))}
    assert looked_up == {"r#1": b"".join(rows["r#1"][1:]), "r#2": b"".join(rows["r#2"])}
