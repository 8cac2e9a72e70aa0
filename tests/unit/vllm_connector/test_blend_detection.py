"""Prompts whose documents the engine finds itself, on the scheduler side."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmcache_client.vllm.blend.scheduler import MAX_FAILURES
from lmcache_client.vllm.hand_over import announce
from tests.harness.client.blend_rig import BLENDING, FIND, QUESTION, document, fake_hashes, prompt
from tests.harness.client.scheduler_rig import blocks
from tests.harness.sidecar.wire import NAMESPACE

START = [5] * 40


@pytest.fixture
def auto(make_rig):
    """An engine that looks for documents in all prompts. Its sidecar has only memory."""
    rig = make_rig(blend="auto")
    rig.session.memory_only = True
    return rig


def blend(rig, request):
    """Let the engine ask until the whole prompt is claimed. Returns the job."""
    assert request.cache_salt in (None, "tenant")
    assert rig.match(request) == (None, False)
    assert "blend" in request.cache_salt
    num_tokens, _ = rig.match(request)
    assert num_tokens == request.num_tokens - 1
    rig.allocate(request, blocks(-(-request.num_tokens // 32)), num_tokens)
    (job,) = rig.step().blend.jobs
    return job


def places(job):
    return [(segment.start, segment.begin, segment.end) for segment in job.segments]


def assert_exact(rig, request):
    """Check that the request differs in nothing from one that was never looked at."""
    assert request.cache_salt in (None, "tenant")
    assert request.block_hashes == fake_hashes(request.all_token_ids, request.cache_salt)
    assert rig.scheduler._states[request.request_id].request is request
    assert rig.scheduler._states[request.request_id].is_exact


@pytest.mark.parametrize("mode", ["request", "auto"])
def test_known_documents_are_found_and_blended(make_rig, mode):
    rig = make_rig(blend=mode)
    rig.session.memory_only = True
    rig.learn(1, 2)
    request = rig.send(prompt(2, 1, start=START), params=FIND if mode == "request" else None)
    job = blend(rig, request)
    assert places(job) == [(40, 40, 232), (240, 240, 432)]
    assert (job.documents, job.question, job.end) == (40, 432, 459)
    assert request.cache_salt == f"\0blend {rig.scheduler._secret}\0attended\0000.15"
    assert rig.leases() == {"r#0", "r#1"}
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], received=["r"])
    assert rig.step(new=[("r", blocks(15), 459, 1)]).stores == []
    blended = {"tokens": 300, "recomputed": 60, "cached": 0, "documents": 2}
    assert rig.scheduler.hand_over(request) == {"lmcache": {"blended": blended}}
    assert rig.finish(request) is False
    assert rig.scheduler._states == rig.scheduler._asked == rig.scheduler._jobs == {}


def test_request_may_choose_how_its_documents_are_blended(rig):
    rig.learn(1, 2)
    request = rig.send(prompt(2, 1), params={"lmcache": {"blend": {"selection": "first", "ratio": 1}}})
    job = blend(rig, request)
    assert (job.selection, job.ratio) == ("first", 1.0)


def test_only_the_part_of_a_document_that_the_prompt_has_is_blended(rig):
    """The mark proposes 400 tokens, of which the prompt has 200."""
    rig.learn(1, num_tokens=400)
    job = blend(rig, rig.send([*START, *document(1), *QUESTION]))
    assert places(job) == [(40, 40, 232)]
    assert (job.documents, job.question) == (40, 232)


def test_exact_prefix_may_cover_a_part_of_a_document(rig):
    rig.learn(1, 2)
    tokens = prompt(2, 1, start=START)
    rig.store_rows(tokens, 4)
    job = blend(rig, rig.send(tokens))
    assert places(job) == [(0, 0, 256), (240, 256, 432)]
    assert (job.documents, job.question) == (256, 432)


@pytest.mark.parametrize("mode", ["request", "auto"])
@pytest.mark.parametrize("section", [{"blend": False}, {"document": True}, {"blend": {"documents": []}}])
def test_prompts_that_forbid_it_are_not_searched(make_rig, monkeypatch, mode, section):
    rig = make_rig(blend=mode)
    monkeypatch.delattr(type(rig.scheduler._known), "find")
    assert_exact(rig, rig.send(prompt(2, 1), params={"lmcache": section}))


def test_silent_requests_are_not_searched_unless_the_mode_is_auto(rig, monkeypatch):
    monkeypatch.delattr(type(rig.scheduler._known), "find")
    for number, params in enumerate((None, {"lmcache": {}}, announce(NAMESPACE, 64))):
        assert_exact(rig, rig.send(prompt(2, 1), str(number), params=params))


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(prompt(3, 4), id="nothing is known"),
        pytest.param([*document(1), *QUESTION], id="a prefix"),
        pytest.param([*START, *document(1, 99), *QUESTION], id="shorter than the setting"),
        pytest.param([*START, *document(1)[:63], *QUESTION], id="too short for a mark"),
        pytest.param(document(1)[:50], id="a short prompt"),
    ],
)
def test_prompt_without_enough_known_documents_is_untouched(auto, tokens):
    auto.learn(1, 2)
    assert_exact(auto, auto.send(tokens, params=None))
    assert auto.scheduler._asked == {}


@pytest.mark.parametrize("stored", [0, 2], ids=["no rows", "rows of one document of three"])
def test_request_whose_documents_cannot_be_proved_is_exact_in_all_ways(auto, stored):
    auto.learn(1, 2, 3, is_stored=False)
    for number in range(stored):
        auto.store_rows(document(1), number + 1)
    tokens = prompt(2, 1, 3)
    request = auto.send(tokens, params=None)
    assert auto.match(request) == (0, False)
    assert_exact(auto, request)
    auto.allocate(request, blocks(20), 0)
    assert auto.scheduler._asked == {}
    (job,) = auto.step(new=[("r", blocks(20), 0, 620)]).stores
    exact = auto.scheduler._states["r"].ticket.row_keys(0, fake_hashes(tokens)[1::2])
    assert job.groups[0].keys == b"".join(exact)
    assert auto.scheduler.hand_over(request) is None


def test_exact_prefix_is_loaded_if_it_leaves_too_little_to_blend(auto):
    auto.learn(1, 2)
    tokens = prompt(2, 1, start=START)
    auto.store_rows(tokens, 6)
    request = auto.send(tokens, params=None)
    assert auto.match(request) == (384, True)
    assert_exact(auto, request)


@pytest.mark.parametrize(
    ("num_start", "computed"),
    [pytest.param(40, 416, id="little is left"), pytest.param(320, 320, id="only the engine has the start")],
)
def test_request_does_not_lose_the_engines_exact_blocks(auto, num_start, computed):
    """The engine finds none of them for the other salt. The sidecar must have enough without them."""
    auto.learn(1, 2)
    tokens = [*[5] * num_start, *(document(2) if num_start < 100 else ()), *document(1), *QUESTION]
    request = auto.send(tokens, params=None)
    assert auto.match(request, computed) == (0, False)
    assert_exact(auto, request)


def test_request_that_was_computed_exactly_stays_exact_after_a_preemption(auto):
    auto.learn(1, 2, is_stored=False)
    request = auto.send(prompt(2, 1), params=None)
    assert auto.begin(request) == 0
    auto.step(new=[("r", blocks(14), 0, 32)])
    for number in (1, 2):
        auto.store_rows(document(number))
    auto.step(preempted=["r"])
    auto.match(request)
    auto.drain_lookups()
    assert auto.match(request) == (192, True), "the exact KV of the second document"
    assert_exact(auto, request)


def test_preempted_request_is_blended_again_with_the_tokens_of_its_answer(rig):
    rig.learn(1, 2)
    request = rig.send(prompt(2, 1, start=START))
    blend(rig, request)
    rig.report_blends(placed=["r"])
    rig.report_blends(blended=["r"], received=["r"])
    rig.step(new=[("r", blocks(15), 459, 1)])
    request.all_token_ids += [8] * 60
    request.update_block_hashes()
    rig.step(preempted=["r"])
    assert rig.match(request, 64) == (None, False)
    rig.drain_lookups()
    assert rig.match(request, 64) == (455, True)
    rig.allocate(request, blocks(17), 455)
    (job,) = rig.step().blend.jobs
    assert (job.begin, job.documents, job.question, job.end) == (64, 64, 432, 519)
    assert places(job) == [(40, 64, 232), (240, 240, 432)]


def test_request_whose_rows_are_evicted_after_it_got_its_salt_is_exact(rig):
    """The KV of the prompt is stored under the keys that it would have had without the salt."""
    rig.learn(1, 2)
    tokens = prompt(2, 1, start=START)
    request = rig.send(tokens)
    assert rig.match(request) == (None, False)
    rig.session.rows.clear()
    assert rig.match(request) == (0, False)
    rig.allocate(request, blocks(15), 0)
    (job,) = rig.step(new=[("r", blocks(15), 0, 460)]).stores
    exact = rig.scheduler._states["r"].ticket.row_keys(0, fake_hashes(tokens)[1::2])
    assert job.groups[0].keys == b"".join(exact)
    assert rig.scheduler.hand_over(request) is None


def test_blended_prompt_that_is_asked_again_is_answered_from_the_engines_cache(auto):
    auto.learn(1, 2)
    request = auto.send(prompt(2, 1, start=START), params=None)
    assert auto.match(request) == (None, False)
    assert auto.match(request, 448) == (0, False)
    auto.allocate(request, blocks(15), 0)
    assert auto.step(new=[("r", blocks(15), 448, 12)]).stores == []
    answer = {"tokens": 0, "recomputed": 0, "cached": 448, "documents": 0}
    assert auto.scheduler.hand_over(request) == {"lmcache": {"blended": answer}}


def test_handed_over_prompt_waits_for_its_exact_kv(auto):
    """A prefill engine stores it at this moment. So blending would only lose accuracy."""
    auto.learn(1, 2)
    tokens = prompt(2, 1, start=START)
    request = auto.send(tokens, params=announce(NAMESPACE, 448))
    assert auto.match(request) == (None, False)
    assert_exact(auto, request)
    auto.store_rows(tokens)
    assert auto.match(request) == (448, True)
    assert_exact(auto, request)


def test_request_waits_for_documents_that_are_promoted(auto):
    lookup, auto.session.memory_only = auto.session.lookup, False

    def answer(request_id, *arguments, **fields):
        """Only rows of documents are on their way."""
        auto.session.num_pending = 3 * ("#" in request_id)
        return lookup(request_id, *arguments, **fields)

    auto.session.lookup = answer
    auto.learn(1, 2, is_stored=False)
    request = auto.send(prompt(2, 1, start=START), params=None)
    assert auto.match(request) == (None, False)
    assert_exact(auto, request)
    for number in (1, 2):
        auto.store_rows(document(number))
    blend(auto, request)


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
    ],
)
def test_requests_that_cannot_be_blended_are_neither_searched_nor_learned(auto, monkeypatch, fields):
    known = type(auto.scheduler._known)
    for method in ("find", "learn", "learn_prompt"):
        monkeypatch.delattr(known, method)
    auto.scheduler._extra_keys_of = lambda request, _: tuple if request.lora_request else None
    for name, params in (("r", None), ("d", {"lmcache": {"document": True}})):
        request = auto.send(prompt(2, 1), name, params=params, **fields)
        if not fields.get("resumable"):
            assert_exact(auto, request)
        auto.begin(request)
        auto.step(new=[(name, blocks(14), 0, 420)])
        request.num_computed_tokens = 420
        auto.finish(request)


def test_tenants_find_only_their_documents(auto):
    auto.learn(1, 2, salt="tenant")
    for name, salt in (("a", None), ("b", "other")):
        assert auto.send(prompt(2, 1), name, params=None, cache_salt=salt).cache_salt == salt
        assert name not in auto.scheduler._asked
    request = auto.send(prompt(2, 1), params=None, cache_salt="tenant")
    assert places(blend(auto, request)) == [(0, 0, 192), (200, 200, 392)]
    assert request.cache_salt.startswith("tenant\0blend")


def test_new_weights_forget_the_documents(auto):
    auto.learn(1, 2)
    waiting = auto.send(prompt(2, 1), "waiting", params=None)
    auto.scheduler.note_change("new weights")
    assert_exact(auto, auto.send(prompt(2, 1), params=None))
    assert auto.scheduler._asked.keys() == {"waiting"}
    auto.match(waiting)
    auto.drain_lookups()
    assert auto.match(waiting) == (0, False)
    assert_exact(auto, waiting)


def test_engine_that_cannot_blend_learns_and_finds_nothing(make_rig, monkeypatch):
    rig = make_rig(replace(BLENDING, can_blend=False), blend="auto")
    for method in ("find", "learn", "learn_prompt", "poll"):
        monkeypatch.delattr(type(rig.scheduler._known), method)
    for name, params in (("r", None), ("s", FIND), ("d", {"lmcache": {"document": True}})):
        request = rig.send(prompt(2, 1), name, params=params)
        rig.begin(request)
        rig.step(new=[(name, blocks(14), 0, 420)])
        request.num_computed_tokens = 420
        rig.finish(request)


def test_malformed_value_is_logged_once_and_the_answer_is_exact(auto, caplog):
    auto.learn(1, 2)
    for name in ("a", "b"):
        assert_exact(auto, auto.send(prompt(2, 1), name, params={"lmcache": {"blend": "yes"}}))
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "blend must be true, false or an object with documents, starts or separator, not 'yes'" in message


def test_side_that_has_stopped_blending_finds_nothing(auto):
    auto.learn(1, 2)
    waiting = auto.send(prompt(2, 1), "waiting", params=None)
    auto.scheduler._num_failures = MAX_FAILURES
    assert_exact(auto, auto.send(prompt(2, 1), params=None))
    assert "r" not in auto.scheduler._asked
    assert auto.match(waiting) == (192, True), "the exact KV of the second document"
    assert_exact(auto, waiting)


@pytest.mark.parametrize("is_isolated", [False, True])
def test_request_that_is_aborted_while_it_waits_leaves_nothing(auto, is_isolated):
    auto.learn(1, 2)
    request = auto.send(prompt(2, 1), params=None)
    assert not is_isolated or auto.match(request) == (None, False)
    assert auto.finish(request) is False
    assert auto.scheduler._states == auto.scheduler._asked == {}


def compute(rig, tokens, name="d", params=None, computed=None):
    """Let the engine compute and store a prompt, and finish."""
    request = rig.send(tokens, name, params=params)
    num_loaded = rig.begin(request)
    meta = rig.step(new=[(name, blocks(20), num_loaded, len(tokens) - num_loaded)])
    rig.commit(meta)
    request.num_computed_tokens = len(tokens) if computed is None else computed
    request.all_token_ids.append(8)
    rig.finish(request)
    rig.commit(rig.step())


@pytest.mark.parametrize(("computed", "is_known"), [(None, True), (100, False)], ids=["finished", "aborted"])
def test_document_is_known_when_it_is_computed(rig, computed, is_known):
    for number in (1, 2):
        compute(rig, document(number, 250), f"d{number}", {"lmcache": {"document": True}}, computed)
    request = rig.send([*START, *document(2, 250), *document(1, 250), *QUESTION])
    assert ("r" in rig.scheduler._asked) is is_known
    if is_known:
        assert places(blend(rig, request)) == [(40, 40, 264), (290, 290, 514)]


def test_documents_that_a_blended_prompt_names_are_known(rig):
    rig.store_rows(document(3))
    rig.blending("named")
    request = rig.send(prompt(3, 1, start=START))
    assert rig.scheduler._asked["r"].params.documents == (range(240, 440),), "the others were not placed"
    assert_exact(rig, request)


def test_auto_finds_the_beginning_of_earlier_prompts(auto):
    compute(auto, [*document(1), *document(4)])
    request = auto.send(prompt(1, start=START), params=None)
    assert auto.scheduler._asked["r"].params.documents == (range(40, 259),)
    assert places(blend(auto, request)) == [(40, 40, 232)]


def test_other_modes_learn_no_prompts(rig):
    compute(rig, [*document(1), *document(4)])
    rig.send(prompt(1, start=START))
    assert rig.scheduler._asked == {}


@pytest.mark.parametrize("reason", ["blended", "too short", "older weights"])
def test_auto_learns_only_prompts_whose_kv_is_exact_and_stored(auto, monkeypatch, reason):
    monkeypatch.delattr(type(auto.scheduler._known), "learn_prompt")
    if reason == "blended":
        auto.learn(1, 2)
        request = auto.send(prompt(2, 1), params=None)
        blend(auto, request)
        auto.report_blends(placed=["r"])
        auto.report_blends(blended=["r"], received=["r"])
        auto.step(new=[("r", blocks(14), 419, 1)])
    else:
        request = auto.send(document(1, 63 if reason == "too short" else 200), params=None)
        auto.begin(request)
        auto.step(new=[("r", blocks(7), 0, request.num_tokens)])
        if reason == "older weights":
            auto.scheduler.note_change("new weights")
    request.num_computed_tokens = request.num_tokens
    auto.finish(request)
