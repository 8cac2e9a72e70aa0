"""Hints as users write them: what is valid, and how each other action is answered."""

import json
import math
from itertools import repeat

import pytest

from lmcache_store.hints import (
    DEFAULT_TTL_SECONDS,
    MAX_ACTIONS,
    NO_HINTS,
    HintAction,
    HintDecision,
    HintKind,
    HintOutcome,
    parse_actions,
)


def only_refusal(action: object) -> str:
    hints = parse_actions([action])
    assert not hints.actions
    (decision,) = hints.refusals
    assert decision.outcome is HintOutcome.REFUSED
    return decision.reason


def test_actions_have_defaults():
    hints = parse_actions(
        [{"action_type": "retain"}, {"action_type": "prefetch"}, {"action_type": "release"}], "m"
    )
    assert hints.message_id == "m"
    assert hints.actions == tuple(HintAction(str(position), kind) for position, kind in enumerate(HintKind))
    assert hints.actions[0].ttl_seconds == DEFAULT_TTL_SECONDS
    assert not hints.refusals


def test_all_fields_are_read():
    retain = {"ttlSeconds": 5, "priority": -7, "prefixTokens": 4096}
    actions = [
        {"action_id": "a", "action_type": "retain", "action_version": "1", "payload": retain},
        {"action_id": "b", "action_type": "release", "payload": {"fromTokens": 100, "prefixTokens": 200}},
    ]
    assert parse_actions(actions).actions == (
        HintAction("a", HintKind.RETAIN, 0, 4096, 5.0, -7),
        HintAction("b", HintKind.RELEASE, 100, 200),
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"action_type": "pin"}, "unknown action type 'pin': the types are retain, prefetch, release"),
        ({"action_type": ["retain"]}, "unknown action type 'list'"),
        ({"action_type": "p\x1b[2Jin"}, r"unknown action type 'p?[2Jin'"),
        ({"action_version": "2"}, "unknown version '2' of retain: use '1'"),
        ({"action_version": 1}, "unknown version 'int' of retain"),
        ({"payload": 3}, "payload must be an object"),
        ({"payload": {"ttl": 3}}, "unknown field 'ttl' of retain: use ttlSeconds, priority, prefixTokens"),
        ({"payload": {7: 3}}, "unknown field 'int' of retain"),
        ({"action_id": ""}, "action_id must be a text of 1 to 128 printable characters"),
        ({"action_id": "x" * 129}, "action_id must be"),
        ({"action_id": "a\nb"}, "action_id must be"),
        *zip(
            ({"payload": {"ttlSeconds": value}} for value in (0, -1, math.nan, math.inf, "9", True, None)),
            repeat("ttlSeconds must be a number of seconds above 0"),
            strict=False,
        ),
        *zip(
            ({"payload": {"priority": value}} for value in (101, -101, 1.0, "1", True)),
            repeat("priority must be a whole number from -100 to 100"),
            strict=False,
        ),
        *zip(
            ({"payload": {"prefixTokens": value}} for value in (-1, 1.5, 1 << 53, "9", False)),
            repeat("prefixTokens must be a whole number of tokens"),
            strict=False,
        ),
        ({"payload": {"prefixTokens": 0}}, "prefixTokens must be 1 or more tokens"),
    ],
)
def test_bad_actions_are_refused_by_name(fields, reason):
    assert only_refusal({"action_type": "retain", **fields}).startswith(reason)


def test_range_must_not_be_empty():
    action = {"action_type": "release", "payload": {"fromTokens": 10, "prefixTokens": 10}}
    assert only_refusal(action) == "prefixTokens must be larger than fromTokens"


@pytest.mark.parametrize("action", [None, 3, "retain", ["retain"]])
def test_actions_must_be_objects(action):
    assert only_refusal(action) == "an action must be an object"


@pytest.mark.parametrize("actions", [None, 7, "retain", b"retain", {"action_type": "retain"}])
def test_actions_must_be_a_list(actions):
    (refusal,) = parse_actions(actions).refusals
    assert refusal == HintDecision("", HintOutcome.REFUSED, "hints must be a list of actions")


def test_a_bad_action_does_not_harm_its_neighbors():
    hints = parse_actions([{"action_type": "retain"}, {"action_type": "pin"}, {"action_type": "release"}])
    assert [action.action_id for action in hints.actions] == ["0", "2"]
    assert [refusal.action_id for refusal in hints.refusals] == ["1"]


def test_a_million_actions_are_read_up_to_the_limit():
    class Actions(list[object]):
        """A list that counts what is read."""

        num_read = 0

        def __getitem__(self, index):
            part = super().__getitem__(index)
            self.num_read += len(part)
            return part

    actions = Actions([{"action_type": "retain"}] * 1_000_000)
    hints = parse_actions(actions)
    assert actions.num_read == len(hints.actions) == MAX_ACTIONS
    (refusal,) = hints.refusals
    assert refusal.reason == "999968 more actions: send at most 32 with a request"


def test_message_ids_are_shown_without_control_characters():
    assert parse_actions([], "a\x1b" + "b" * 1000).message_id == "a?" + "b" * 126
    assert parse_actions([], 7).message_id == ""


def test_decisions_are_json():
    decision = HintDecision("a", HintOutcome.CLIPPED, "bounded by retainPercent", 512, 1.23456)
    assert json.loads(json.dumps(decision.as_json())) == {
        "action_id": "a",
        "outcome": "clipped",
        "reason": "bounded by retainPercent",
        "tokens": 512,
        "ttlSeconds": 1.235,
    }
    assert HintDecision("a", HintOutcome.ACCEPTED).as_json() == {"action_id": "a", "outcome": "accepted"}


def test_no_hints_are_false():
    assert not NO_HINTS
    assert not parse_actions([])
    assert parse_actions([{}])
