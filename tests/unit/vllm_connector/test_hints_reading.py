"""The KV hints of a vLLM request: an envelope, a list of actions, or both."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from lmcache_client.vllm.hints import ANSWER_FIELD, FIELD, read_hints
from lmcache_store.hints import MAX_ACTIONS, HintKind, HintOutcome, parse_actions

RETAIN = {"action_id": "a", "action_type": "retain", "payload": {"ttlSeconds": 60, "priority": 3}}
ANSWER_ID = "0123456789abcdef" * 2


class Action(msgspec.Struct, frozen=True):
    """Like ``KvHintAction`` of vLLM 0.32."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    """Like ``KvHintsEnvelope`` of vLLM 0.32."""

    protocol_version: str
    message_id: str
    actions: list[Action]


def request(given=None, kv_hints=None, **params):
    fields = params if given is None else {FIELD: given, **params}
    return SimpleNamespace(kv_transfer_params=fields or None, kv_hints=kv_hints)


def envelope(*actions, version="1"):
    structs = [Action(**{"action_version": "1", "payload": {}, **action}) for action in actions]
    return Envelope(version, "session 7", structs)


@pytest.mark.parametrize(
    "plain",
    [
        SimpleNamespace(),
        request(),
        request(do_remote_decode=True),
        request([]),
        request(**{ANSWER_FIELD: ANSWER_ID}),
        SimpleNamespace(kv_transfer_params=[FIELD], kv_hints=None),
        SimpleNamespace(kv_transfer_params=FIELD, kv_hints=None),
    ],
)
def test_request_without_hints(plain):
    assert read_hints(plain) is None


def test_actions_in_both_places():
    expected = parse_actions([RETAIN])
    assert read_hints(request([RETAIN])) == (expected, "")
    assert read_hints(request({"actions": [RETAIN]})) == (expected, "")
    named = expected._replace(message_id="session 7")
    assert read_hints(request({"actions": (RETAIN,), "message_id": "session 7"})) == (named, "")
    assert read_hints(request(kv_hints=envelope(RETAIN))) == (named, "")
    both = read_hints(request([RETAIN], envelope({"action_id": "p", "action_type": "prefetch"})))
    assert both is not None
    assert [action.kind for action in both.hints.actions] == [HintKind.PREFETCH, HintKind.RETAIN]
    assert both.hints.message_id == "session 7"


def test_request_of_vllm_has_its_hints_in_both_places():
    kv_hints = pytest.importorskip("vllm.v1.kv_hints")
    params = SamplingParams(extra_args={"kv_transfer_params": {FIELD: [RETAIN]}})
    plain = msgspec.to_builtins(envelope({"action_id": "p", "action_type": "prefetch"}))
    hints = msgspec.convert(plain, kv_hints.KvHintsEnvelope)
    asked = read_hints(Request("r", [1, 2], params, None, kv_hints=hints))
    assert asked is not None
    assert [action.action_id for action in asked.hints.actions] == ["p", "a"]
    assert read_hints(Request("r", [1, 2], SamplingParams(), None)) is None


@pytest.mark.parametrize(("version", "is_known"), [("1", True), ("1.0", True), ("0.1", True), ("2", False)])
def test_envelope_of_an_unknown_version_is_refused_by_the_names_of_its_actions(version, is_known):
    asked = read_hints(
        request(kv_hints=envelope(RETAIN, {"action_id": "b", "action_type": "pin"}, version=version))
    )
    assert asked is not None
    assert len(asked.hints.actions) == is_known
    assert [refusal.action_id for refusal in asked.hints.refusals] == (["b"] if is_known else ["a", "b"])
    assert is_known or "unknown protocol_version '2': use '1'" in asked.hints.refusals[0].reason


@pytest.mark.parametrize("version", [7, None, ["1"], {}])
def test_version_of_another_type_is_refused(version):
    asked = read_hints(request({"protocol_version": version, "actions": [RETAIN]}))
    assert asked is not None
    assert [refusal.action_id for refusal in asked.hints.refusals] == ["a"]


@pytest.mark.parametrize("value", [7, "retain", {}, {"actions": "retain"}, {"actions": {}}, True, b"x"])
def test_value_that_is_no_list_is_refused(value):
    asked = read_hints(request(value))
    assert asked is not None
    assert [refusal.reason for refusal in asked.hints.refusals] == ["hints must be a list of actions"]


def test_more_actions_than_allowed_are_refused():
    many = [{"action_type": "prefetch"}] * 1_000_000
    for asked in (read_hints(request(many)), read_hints(request({"actions": many}))):
        assert asked is not None
        assert len(asked.hints.actions) == MAX_ACTIONS
        assert [refusal.reason.split()[0] for refusal in asked.hints.refusals] == ["999968"]
    both = read_hints(request(many[:MAX_ACTIONS], envelope(RETAIN)))
    assert both is not None
    assert len(both.hints.actions) == MAX_ACTIONS
    assert [(refusal.action_id, refusal.outcome) for refusal in both.hints.refusals] == [
        ("31", HintOutcome.REFUSED)
    ]


@pytest.mark.parametrize(
    ("answer_id", "is_held"),
    [
        (ANSWER_ID, True),
        *((other, False) for other in ("", "0a", ANSWER_ID + "0", "A" * 32, 7, None, [ANSWER_ID])),
    ],
)
def test_answer_id_must_have_the_form_of_the_middleware(answer_id, is_held):
    assert read_hints(request([RETAIN], **{ANSWER_FIELD: answer_id})) == (
        parse_actions([RETAIN]),
        ANSWER_ID if is_held else "",
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.sampled_from(["actions"]), inner)
    ),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, "1", "2"]))
def test_no_value_raises(value, version):
    for given_value in (value, {"actions": value, "protocol_version": version, "message_id": value}):
        read_hints(request(given_value))
        read_hints(request(kv_hints=given_value))
        read_hints(SimpleNamespace(kv_transfer_params=given_value))
