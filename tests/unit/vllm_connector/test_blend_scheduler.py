"""Prompts whose documents are reused at any position, on the scheduler side."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmcache_client.vllm.blend.separator import Separator
from lmcache_client.vllm.hand_over import announce
from lmcache_store.kv_groups import GroupKind, KVGroup
from tests.harness.client.blend_rig import (
    BLENDING,
    QUESTION,
    FakeRequest,
    document,
    fake_hashes,
    prompt,
)
from tests.harness.client.scheduler_rig import blocks, make_identity
from tests.harness.sidecar.wire import NAMESPACE


def places(job):
    return [(segment.start, segment.begin, segment.end) for segment in job.segments]


def test_prompt_of_known_documents_is_claimed_and_placed(rig):
    request, job = rig.blending()
    assert (job.request_id, job.tokens, job.blocks) == ("r", tuple(prompt(2, 1)), tuple(blocks(14)))
    assert (job.begin, job.documents, job.question, job.end) == (0, 0, 400, 419)
    assert (job.selection, job.ratio) == ("attended", 0.15)
    assert places(job) == [(0, 0, 192), (200, 200, 392)]
    assert rig.leases() == {"r", "r#1"}, "the first document is a prefix of the prompt"
    assert request.cache_salt == f"\0blend {rig.scheduler._secret}\0attended\0000.15"


def test_exact_prefix_is_loaded_as_it_is_and_only_the_rest_is_blended(rig):
    """The chain of the prompt's own rows ends in the second document."""
    rig.store_rows(prompt(2, 1), 4)
    rig.store_rows(document(3))
    request, offer = rig.ask(prompt(2, 1, 3), blend={"documents": [200, 200, 200], "ratio": 0.5})
    assert offer == (619, True)
    rig.allocate(request, blocks(20), 619)
    (job,) = rig.step().blend.jobs
    assert places(job) == [(0, 0, 256), (400, 400, 592)]
    assert job.ratio == 0.5
    assert rig.leases() == {"r", "r#2"}
    (scheduled,) = [report for name, _, report in rig.session.scheduled if name == "r"]
    assert (scheduled.num_hit_chunks, scheduled.num_loaded_tokens) == (4, 256)


def test_separators_of_documents_are_computed(make_rig):
    mark = 999_999
    rig = make_rig(separator=Separator((mark, mark)))
    for number in (1, 2):
        rig.store_rows(document(number))
    tokens = [5] * 40
    for part in (document(2), document(1), QUESTION):
        tokens += [mark, mark, *part]
    request, offer = rig.ask(tokens, blend={"separator": True})
    assert offer == (len(tokens) - 1, True)
    rig.allocate(request, blocks(15), offer[0])
    (job,) = rig.step().blend.jobs
    assert (job.documents, job.question) == (42, 444)
    assert places(job) == [(42, 42, 234), (244, 244, 436)]


def test_slices_run_when_all_ranks_have_placed_their_rows(make_rig):
    rig = make_rig(num_ranks=2)
    for name, first_block in (("r", 100), ("s", 200)):
        rig.blending(name, first_block=first_block)
    rig.report_blends(placed=["r", "s"])
    assert rig.step().blend is None
    rig.report_blends(placed=["s"])
    rig.report_blends(placed=["r"])
    step = rig.step(new=[("other", blocks(10), 0, 300)]).blend
    assert (step.ready, step.max_tokens) == (["s", "r"], 700)
    step = rig.step().blend
    assert (step.jobs, step.ready, step.dropped, step.max_tokens) == ([], [], [], 1000)
    rig.report_blends(blended=["s"], received=["s"])
    assert rig.step().blend.max_tokens == 1000
    rig.report_blends(blended=["r"], received=["r"])
    assert rig.step() is rig.step(), "steps without work have the same empty message"
    assert rig.leases() == set()


def test_blended_prompt_is_answered_with_its_amounts_and_never_stored(rig):
    request, _ = rig.blending()
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], received=["r"])
    assert rig.step(new=[("r", blocks(14), 419, 1)]).stores == []
    request.all_token_ids += [8] * 100
    request.num_computed_tokens = 519
    assert rig.step(cached=[("r", blocks(3, 300), 420, 99, False)]).stores == []
    blended = {"tokens": 300, "recomputed": 60, "cached": 0}
    assert rig.scheduler.hand_over(request) == {"lmcache": {"blended": blended}}
    assert rig.finish(request) is False
    assert rig.scheduler._states == rig.scheduler._asked == rig.scheduler._jobs == {}


def test_hand_over_announces_only_the_exact_prefix(rig):
    rig.store_rows(prompt(2, 1), 4)
    rig.store_rows(document(3))
    params = {"lmcache": {"blend": {"documents": [200, 200, 200]}}, "do_remote_decode": True}
    request, offer = rig.ask(prompt(2, 1, 3), kv_transfer_params=params)
    rig.allocate(request, blocks(20), offer[0])
    rig.report_blends(blended=["r"], received=["r"])
    handed_over = rig.scheduler.hand_over(request)["lmcache"]
    assert handed_over.pop("blended")["tokens"] == 300
    assert {"lmcache": handed_over} == announce(NAMESPACE, 256)


def test_blended_prompt_that_is_asked_again_is_answered_from_the_engines_cache(rig):
    request, _ = rig.blending()
    rig.report_blends(blended=["r"], received=["r"])
    rig.finish(request)
    again, offer = rig.ask(prompt(2, 1), "again", computed=416)
    assert offer == (0, False)
    rig.allocate(again, blocks(14), 0)
    meta = rig.step(new=[("again", blocks(14), 416, 4)])
    assert meta.stores == []
    assert rig.scheduler.hand_over(again)["lmcache"]["blended"] == {
        "tokens": 0,
        "recomputed": 0,
        "cached": 416,
    }


def test_answer_says_so_if_the_engine_gets_blended_blocks_while_the_request_waits(rig):
    rig.session.memory_only, rig.session.num_pending = False, 4
    request, offer = rig.ask(prompt(2, 1))
    assert offer == (None, False)
    assert rig.match(request, 416) == (0, False)
    rig.allocate(request, blocks(14), 0)
    assert rig.scheduler.hand_over(request)["lmcache"]["blended"]["cached"] == 416


def test_request_that_asks_in_vain_is_exact_and_stores_its_kv(rig):
    request, offer = rig.ask(prompt(2, 1))
    assert offer == (0, False)
    rig.allocate(request, blocks(14), 0)
    job, _ = rig.step(new=[("r", blocks(14), 0, 420)]).stores  # the other one is of the second document
    exact = rig.scheduler._states["r"].ticket.row_keys(0, fake_hashes(prompt(2, 1))[1::2])
    assert job.groups[0].keys == b"".join(exact), "the keys are those of the request before it got a salt"
    assert rig.scheduler.hand_over(request) is None


@pytest.mark.parametrize("when", ["first", "after a preemption"])
def test_kv_after_blocks_of_the_engines_cache_is_not_stored(rig, when):
    """These blocks have the salt of blended prompts, so they may be blended."""
    request, _ = rig.ask(prompt(2, 1), computed=128 if when == "first" else 0)
    rig.allocate(request, blocks(14), 0)
    if when == "after a preemption":
        rig.step(new=[("r", blocks(14), 0, 32)])
        rig.step(preempted=["r"])
        rig.match(request, 128)
        rig.drain_lookups()
        assert rig.match(request, 128) == (0, False)
        rig.allocate(request, blocks(14), 0)
    assert rig.scheduler._computing._states == {}, "no other request must wait for its chunks"
    assert rig.step(new=[("r", blocks(14), 128, 292)]).stores == []
    request.num_computed_tokens = 420
    assert rig.finish(request) is False


def test_preempted_request_is_blended_again_with_the_tokens_of_its_answer(rig):
    request, _ = rig.blending()
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], received=["r"])
    rig.step(new=[("r", blocks(14), 419, 1)])
    request.all_token_ids += [8] * 40
    request.update_block_hashes()
    rig.step(preempted=["r"])
    assert rig.match(request, 32) == (None, False)
    rig.drain_lookups()
    assert rig.match(request, 32) == (427, True)
    rig.allocate(request, blocks(15), 427)
    (job,) = rig.step().blend.jobs
    assert (job.begin, job.question, job.end, len(job.tokens)) == (32, 400, 459, 460)
    assert places(job) == [(0, 32, 192), (200, 200, 392)]
    assert rig.leases() == {"r", "r#1"}


def test_requests_that_do_not_ask_are_untouched(rig):
    plain = rig.arrive(FakeRequest(prompt(1, 2), "plain"))
    assert plain.cache_salt is None
    assert plain.block_hashes == fake_hashes(prompt(1, 2))
    assert rig.scheduler._asked == {}
    assert rig.scheduler._states["plain"].request is plain


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_reading_prefix_cache": True},
        {"lora_request": SimpleNamespace(lora_path="/tmp/adapter", lora_int_id=1)},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"sampling_params": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=3)},
        {"resumable": True},
        {"kv_transfer_params": {"lmcache": {"blend": {"documents": [200, 300]}}}},
    ],
)
def test_requests_that_cannot_be_blended_are_untouched(rig, fields):
    for number in (1, 2):
        rig.store_rows(document(number))
    rig.scheduler._extra_keys_of = lambda request, _: tuple if request.lora_request else None
    request = rig.arrive(FakeRequest(prompt(2, 1), blend={"documents": [200, 200]}, **fields))
    assert request.cache_salt is None
    assert request.block_hashes == fake_hashes(prompt(2, 1))
    assert rig.scheduler._asked == {}


@pytest.mark.parametrize(
    "lengths", [[200], [200, 127], [300, *[40] * 3]], ids=["a prefix", "too short", "too few whole blocks"]
)
def test_prompt_whose_documents_are_too_short_is_untouched(rig, lengths):
    rig.session.memory_only, rig.session.num_pending = False, 4
    rig.scheduler._settings = replace(rig.scheduler._settings, blend_min_tokens=97)
    tokens = document(1, sum(lengths)) + QUESTION
    request = rig.arrive(FakeRequest(tokens, blend={"documents": lengths}))
    assert request.cache_salt is None
    assert request.block_hashes == fake_hashes(tokens)
    assert rig.scheduler._asked == {}


@pytest.mark.parametrize(
    "identity",
    [
        replace(BLENDING, can_blend=False),
        replace(BLENDING, hash_tokens=16),
        replace(
            make_identity(KVGroup(0, 32, 4096), KVGroup(1, 32, 4096, 64, GroupKind.SLIDING_WINDOW)),
            can_blend=True,
        ),
    ],
    ids=["refused by the workers", "hashes of half a block", "window"],
)
def test_engines_that_cannot_blend_answer_exactly(make_rig, identity):
    rig = make_rig(identity)
    request = rig.arrive(FakeRequest(prompt(2, 1), blend={"documents": [200, 200]}))
    assert request.cache_salt is None
    assert rig.scheduler._asked == {}


def test_malformed_parameters_are_logged_once_for_each_field(rig, caplog):
    for name in ("a", "b"):
        request = rig.arrive(FakeRequest(prompt(2), name, blend={"documents": [900]}))
        assert request.cache_salt is None
    rig.arrive(FakeRequest(prompt(2), "c", kv_transfer_params={"lmcache": {"document": 1}}))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "LMCache Cluster ignores what request a says about documents in kv_transfer_params: documents must"
        " have numbers from 0 to 220, not 900. Correct the client."
        " Later errors in this field are not logged.",
        "LMCache Cluster ignores what request c says about documents in kv_transfer_params: document must be"
        " true or false, not 1. Correct the client. Later errors in this field are not logged.",
    ]


def test_documents_are_not_counted_as_requests(rig):
    relayed, lookup = {}, rig.session.lookup

    def record(request_id, *arguments, is_relayed, **fields):
        relayed[request_id] = is_relayed
        return lookup(request_id, *arguments, **fields)

    rig.session.memory_only, rig.session.lookup = False, record
    rig.ask(prompt(2, 1))
    assert relayed == {"r": False, "r#0": True, "r#1": True}


def test_documents_are_searched_together(rig, monkeypatch):
    """A search of each of 256 documents would take 7 ms of the engine's step."""
    for number in (1, 2):
        rig.store_rows(document(number))
    searches, find_each = [], rig.session.find_each

    def record(keys):
        searches.append(len(keys))
        return find_each(keys)

    monkeypatch.setattr(rig.session, "find_each", record)
    monkeypatch.setattr(rig.lookups, "find", lambda *_: None)
    rig.arrive(FakeRequest(prompt(2, 1), blend={"documents": [20, 180, 200]}))
    rig.match(rig.scheduler._asked["r"].view)
    assert searches == [3 + 3] * 2, "one search of exact rows, and one of taken rows"


def test_request_waits_for_documents_that_are_promoted(rig):
    rig.session.memory_only, lookup = False, rig.session.lookup

    def answer(request_id, *arguments, **fields):
        """Only rows of the second document are on their way."""
        rig.session.num_pending = 2 * (request_id == "r#1")
        return lookup(request_id, *arguments, **fields)

    rig.session.lookup = answer
    rig.store_rows(document(2))
    rig.store_rows(document(1), 1)
    request, offer = rig.ask(prompt(2, 1))
    assert offer == (None, False)
    rig.store_rows(document(1))
    assert rig.match(request) == (419, True)


def test_request_does_not_wait_for_rows_that_no_tier_has(make_rig):
    rig = make_rig()
    rig.store_rows(document(2))
    rig.store_rows(document(1), 3)  # its tail was not stored
    _, offer = rig.ask(prompt(2, 1))
    assert offer == (419, True)


def test_request_waits_for_a_document_that_another_request_computes(rig):
    other = rig.arrive(FakeRequest(document(1) + QUESTION, "other"))
    assert rig.begin(other) == 0
    rig.store_rows(document(2))
    request, offer = rig.ask(prompt(2, 1))
    assert offer == (None, False)
    meta = rig.step(new=[("other", blocks(7), 0, 220)])
    rig.commit(meta)
    rig.report(ended={job.job_id: 1 for job in meta.stores})
    assert rig.match(request) == (419, True)


def test_prompt_that_does_not_fit_in_the_engines_memory_is_exact(rig):
    rig.scheduler._open_loads.num_blocks = 13
    for number in (1, 2):
        rig.store_rows(document(number))
    request, offer = rig.ask(prompt(2, 1))
    assert offer == (192, True), "the exact KV of the first document"
    rig.allocate(request, blocks(14), 192)
    meta = rig.step()
    assert (len(meta.loads), meta.blend) == (1, None)


def test_blends_wait_for_the_memory_of_other_loads(rig):
    rig.scheduler._open_loads.num_blocks = 20
    rig.blending()
    _, offer = rig.ask(prompt(1, 2), "s")
    assert offer == (None, False)
    rig.report_blends(received=["r"], blended=["r"])
    rig.step(new=[("r", blocks(14), 419, 1)])
    assert rig.match(rig.scheduler._asked["s"].view) == (419, True)


@pytest.mark.parametrize("is_stored", [True, False])
def test_tail_of_a_document_completes_its_rows(rig, is_stored):
    """Also if all of its chunks were hits."""
    tokens = document(1, 250)
    if is_stored:
        rig.store_rows(tokens, 3)
    request = rig.arrive(FakeRequest(tokens, kv_transfer_params={"lmcache": {"document": True}}))
    num_loaded = rig.begin(request)
    assert num_loaded == 192 * is_stored
    if is_stored:
        rig.step()
        rig.report(received=["r"])
    meta = rig.step(new=[("r", blocks(8), num_loaded, 250 - num_loaded)])
    assert bool(meta.stores) is not is_stored
    rig.commit(meta)
    rig.report(ended=[job.job_id for job in meta.stores])
    request.num_computed_tokens = 250
    request.all_token_ids.append(8)
    assert rig.finish(request) is True, "the engine holds the blocks until the tail is stored"
    meta = rig.step()
    (part,) = meta.stores[0].groups
    assert (part.first_chunk, part.blocks, meta.held) == (3, (106, 106), ["r"])
    rig.commit(meta)
    rig.report(ended=[job.job_id for job in meta.stores], sent=["r"])
    rig.store_rows(document(2))
    _, offer = rig.ask(document(2) + tokens + QUESTION, "s", blend={"documents": [200, 250]})
    assert offer == (469, True)
    assert places(rig.scheduler._asked["s"].claim) == [(0, 0, 192), (200, 200, 424)]
    exact = rig.arrive(FakeRequest(tokens + QUESTION * 3, "exact"))
    assert rig.match(exact) == (192, True), "an exact lookup never finds the tail"


@pytest.mark.parametrize("request_blend", [None, {"documents": [200]}])
def test_document_of_whole_chunks_and_other_requests_store_no_tail(rig, request_blend):
    params = {"lmcache": {"document": True, "blend": request_blend}}
    request = rig.arrive(
        FakeRequest(document(1) + QUESTION * (request_blend is not None), kv_transfer_params=params)
    )
    rig.begin(request)
    meta = rig.step(new=[("r", blocks(7), 0, request.num_tokens)])
    rig.report(ended=[job.job_id for job in meta.stores])
    request.num_computed_tokens = request.num_tokens
    request.all_token_ids.append(8)
    assert rig.finish(request) is False


def test_aborted_document_stores_no_tail(rig):
    params = {"lmcache": {"document": True}}
    request = rig.arrive(FakeRequest(document(1, 250), kv_transfer_params=params))
    rig.begin(request)
    request.num_computed_tokens = 100
    assert rig.finish(request) is False
