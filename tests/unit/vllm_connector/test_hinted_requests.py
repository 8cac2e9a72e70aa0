"""KV hints of requests on the scheduler side: sent once, answered in the response, and held if asked."""

from types import SimpleNamespace

import grpc
import pytest

from lmcache_client.errors import UnnamedError
from lmcache_client.rpc.errors import RpcRefusedError
from lmcache_client.vllm.hinted import HOLD_SECONDS
from lmcache_client.vllm.hints import ANSWER_FIELD, FIELD
from lmcache_store import keys
from tests.harness.client.blend_rig import BlendRig, FakeRequest, prompt
from tests.harness.client.parted_rig import PartedRig
from tests.harness.client.scheduler_rig import Rig, blocks, make_request
from tests.harness.sidecar.wire import NAMESPACE

RETAIN = {"action_id": "a", "action_type": "retain"}
UNKNOWN = {"action_id": "b", "action_type": "pin"}
ANSWER_ID = "0123456789abcdef" * 2
TO_DECODE = {"do_remote_decode": True}


@pytest.fixture
def new_rig():
    """The constructor of engines that blend no prompts."""
    return Rig


def hinted(num_tokens=200, *actions, **fields):
    params = {FIELD: list(actions or [RETAIN]), **fields.pop("params", {})}
    return make_request(num_tokens, kv_transfer_params=params, **fields)


def held(**fields):
    return hinted(200, RETAIN, UNKNOWN, params={ANSWER_FIELD: ANSWER_ID}, **fields)


def cannot_be_named():
    raise UnnamedError("its adapter changed")


def answer_of(rig, request):
    """End a request. Returns the answer to its hints in the response; None if it has none."""
    params = rig.scheduler.end_answer(request)
    rig.finish(request)
    return ((params or {}).get("lmcache") or {}).get("hints")


def reasons(answer):
    return [(decision["action_id"], decision["outcome"], decision.get("reason", "")) for decision in answer]


def test_hints_are_sent_with_the_keys_of_the_request_and_answered(rig):
    request = rig.arrive(hinted(200, RETAIN, UNKNOWN, cache_salt="salt"))
    (applied,) = rig.session.applied
    tenant = keys.tenant("salt", NAMESPACE)
    assert applied[:3] + applied[4:] == ("r", [(0, 3)], tenant, "")
    assert rig.begin(request) == 0, "hints do not hold requests"
    accepted, refused = answer_of(rig, request)
    assert accepted == {"action_id": "a", "outcome": "accepted"}
    assert refused["reason"].startswith("unknown action type 'pin'")
    assert rig.scheduler.end_answer(request) is None, "the answer is forgotten"


def test_request_without_hints_has_no_answer(rig):
    request = rig.arrive(make_request(200))
    assert answer_of(rig, request) is None
    assert rig.session.applied == []


def test_keys_of_long_prompts_are_known_before_the_hints_are_sent(rig):
    rig.arrive(hinted(64 * 40 + 1))
    assert rig.session.applied[0].num_keys == [(0, 40)]


def test_short_prompt_is_sent_without_keys(rig):
    rig.arrive(hinted(20))
    assert rig.session.applied[0].num_keys == [(0, 0)]


def test_preempted_request_applies_its_hints_once(rig):
    request = rig.computing(hinted())
    rig.step([("r", blocks(7), 0, 200)])
    rig.step(preempted=["r"])
    assert rig.begin(request) == 0
    rig.drain_lookups()
    assert len(rig.session.applied) == 1
    assert reasons(answer_of(rig, request)) == [("a", "accepted", "")]


def test_answer_is_merged_with_the_hand_over(rig):
    request = rig.arrive(hinted(params=TO_DECODE))
    ids = blocks(7)
    rig.allocate(request, ids, rig.match(request)[0])
    rig.step([("r", ids, 0, 200)])
    request.num_computed_tokens = 200
    (section,) = rig.scheduler.end_answer(request).values()
    assert (section["num_tokens"], reasons(section["hints"])) == (192, [("a", "accepted", "")])


def test_blended_request_hints_its_exact_keys(monkeypatch):
    rig = BlendRig(monkeypatch)
    rig.session.memory_only = True
    request = FakeRequest(prompt(1, 2), blend={"documents": [200, 200]})
    exact = list(request.block_hashes)
    request.kv_transfer_params[FIELD] = [RETAIN]
    rig.arrive(request)
    assert request.block_hashes != exact, "the request has the salt of blended prompts"
    (applied,) = rig.session.applied
    assert applied.num_keys == [(0, len(request.all_token_ids) // 64)]
    assert applied.tenant == keys.tenant("", NAMESPACE)
    assert reasons(answer_of(rig, request)) == [("a", "accepted", "")]
    rig.scheduler.go_offline()


def test_request_without_keys_is_refused_with_the_reason(rig):
    rig.scheduler._extra_keys_of = lambda request, chunk_tokens: cannot_be_named
    request = rig.arrive(hinted(200, RETAIN, UNKNOWN))
    assert rig.session.applied == []
    first, second = reasons(answer_of(rig, request))
    assert first == ("a", "refused", "the request is not cached: its adapter changed")
    assert second[:2] == ("b", "refused")


def test_streaming_session_is_refused(rig):
    request = rig.arrive(hinted(resumable=True))
    assert rig.session.applied == []
    (decision,) = answer_of(rig, request)
    assert (decision["outcome"], "streaming session" in decision["reason"]) == ("refused", True)


def test_engine_over_several_nodes_refuses_hints():
    rig = PartedRig()
    request = rig.arrive(hinted())
    (decision,) = answer_of(rig, request)
    assert (decision["outcome"], "several nodes" in decision["reason"]) == ("refused", True)
    waiting = rig.arrive(held(request_id="held"))
    assert [refusal.action_id for refusal in rig.session.applied[0].hints.refusals] == ["a", "b"]
    assert rig.match(waiting) == (None, False)
    rig.scheduler.go_offline()


def test_older_sidecar_refuses_hints(rig):
    rig.session.hints_error = RpcRefusedError(grpc.StatusCode.UNIMPLEMENTED, "no such method")
    (decision,) = answer_of(rig, rig.arrive(hinted()))
    assert (decision["outcome"], "sidecar is older" in decision["reason"]) == ("refused", True)


@pytest.mark.parametrize("fault", ["silent", "refusing", "late", "detached", "offline"])
def test_hints_without_an_answer_are_deferred(rig, fault):
    rig.session.is_down = fault == "silent"
    if fault == "refusing":
        rig.session.hints_error = RpcRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
    if fault == "detached":
        rig.lookups._client = rig.lookups._calls._client = SimpleNamespace(session=None, close=lambda: None)
    if fault == "offline":
        rig.scheduler.go_offline()
    request = hinted(200, RETAIN, UNKNOWN)
    if fault == "late":
        rig.lookups.run = lambda task: None
    rig.scheduler.on_new_request(request)
    if fault != "offline":
        rig.drain_lookups()
    text = {"silent": "down", "refusing": "busy", "late": "had not answered"}.get(fault, "no sidecar")
    first, second = reasons(answer_of(rig, request))
    assert first[:2] == ("a", "deferred")
    assert text in first[2]
    assert second[:2] == ("b", "refused"), "an invalid action stays refused"


def test_request_for_its_hints_is_held_for_a_limited_time(rig):
    rig.stored(3)
    request = rig.arrive(held())
    (applied,) = rig.session.applied
    assert applied.answer_id == ANSWER_ID
    assert [refusal.action_id for refusal in applied.hints.refusals] == ["b"]
    rig.now = HOLD_SECONDS - 0.1
    assert rig.match(request) == (None, False)
    rig.step()
    rig.now = HOLD_SECONDS
    assert rig.match(request) == (192, True)


def test_abort_ends_the_hold(rig):
    request = rig.arrive(held())
    assert rig.match(request) == (None, False)
    assert len(answer_of(rig, request)) == 2
    assert rig.scheduler._hinted._requests == {}


def test_held_request_lets_other_requests_run(rig):
    rig.stored(3)
    waiting = rig.arrive(held(request_id="held"))
    other = rig.arrive(make_request(200))
    assert rig.match(waiting) == (None, False)
    assert rig.match(other) == (192, True)


def test_engine_without_a_cache_does_not_hold(rig):
    request = rig.arrive(held())
    rig.scheduler.go_offline()
    assert rig.match(request) == (0, False)


def test_refusals_of_an_uncached_request_reach_the_reader_of_the_answer(rig):
    rig.scheduler._extra_keys_of = lambda request, chunk_tokens: cannot_be_named
    rig.arrive(held())
    (applied,) = rig.session.applied
    assert (applied.num_keys, applied.hints.actions) == ([(0, 0)], ())
    assert [refusal.action_id for refusal in applied.hints.refusals] == ["a", "b"]


def test_bug_in_the_search_for_keys_refuses_the_hints(rig):
    """The lookup thread survives the bug."""

    def fail():
        raise RuntimeError("boom")

    rig.scheduler._extra_keys_of = lambda request, chunk_tokens: fail
    request = rig.arrive(hinted())
    assert reasons(answer_of(rig, request)) == [
        ("a", "refused", "the request is not cached: its keys are not known")
    ]
