"""Reads the KV hints of a vLLM request. Pure.

A request can have hints in two places, and may use both:

- ``kv_hints``: an envelope (vLLM 0.32 and later). vLLM's server in Python has no field for it.
- ``kv_transfer_params["lmcache.hints"]``: a list of actions, or an envelope as an object.

``lmcache_store.hints`` describes envelopes and actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_store.hints import (
    MAX_ACTIONS,
    NO_HINTS,
    HintAction,
    HintDecision,
    HintOutcome,
    Hints,
    parse_actions,
)

FIELD = "lmcache.hints"
"""Key of hints in ``kv_transfer_params``."""

ANSWER_FIELD = "lmcache.hints_only"
"""Key of the ``answer_id`` in ``kv_transfer_params``, of a request that ``HintsRoute`` makes up."""

PROTOCOL_VERSIONS = ("1", "1.0", "0.1")
"""Versions of the envelope, whose fields are the same in all of them. Callers of vLLM use each of these."""

_ANSWER_ID = re.compile("[0-9a-f]{32}")
_ACTION_FIELDS = ("action_id", "action_type", "action_version", "payload")


class RequestHints(NamedTuple):
    """The hints of one request."""

    hints: Hints
    answer_id: str = ""
    """Name under which the sidecar keeps the answer; empty: only the request's response contains it."""


def read_hints(request: Any) -> RequestHints | None:
    """Return the hints of vLLM's request; None if it has none. Never raises."""
    envelope = getattr(request, "kv_hints", None)
    params = getattr(request, "kv_transfer_params", None)
    if envelope is None and not params:
        return None
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if envelope is None and given is None:
        return None
    hints = parse_hints(envelope) if envelope is not None else NO_HINTS
    if given is not None:
        hints = _joined(hints, parse_hints(given))
    answer_id = params.get(ANSWER_FIELD) if isinstance(params, Mapping) else None
    if isinstance(answer_id, str) and _ANSWER_ID.fullmatch(answer_id):
        return RequestHints(hints, answer_id)
    return RequestHints(hints) if hints else None


def parse_hints(value: object) -> Hints:
    """Return the hints in a list of actions, or in an envelope: an object, or vLLM's type. Never raises."""
    if isinstance(value, list | tuple):
        return parse_actions(value)
    fields = (
        value
        if isinstance(value, Mapping)
        else _attributes(value, "protocol_version", "message_id", "actions")
    )
    actions = fields.get("actions")
    if isinstance(actions, list | tuple):
        actions = [*map(_action_fields, actions[:MAX_ACTIONS]), *actions[MAX_ACTIONS:]]
    hints = parse_actions(actions, fields.get("message_id"))
    version = fields.get("protocol_version", PROTOCOL_VERSIONS[0])
    if version in PROTOCOL_VERSIONS:
        return hints
    shown = ascii(version[:32]) if isinstance(version, str) else type(version).__name__
    return refused(hints, f"unknown protocol_version {shown}: use {PROTOCOL_VERSIONS[0]!r}")


def refused(hints: Hints, reason: str) -> Hints:
    """Return the hints with all actions refused."""
    return Hints(hints.message_id, refusals=(*decisions(hints, HintOutcome.REFUSED, reason),))


def decisions(hints: Hints, outcome: HintOutcome, reason: str) -> list[HintDecision]:
    """Return the answer to all actions, with the same outcome for those that are not refused yet."""
    same = [HintDecision(action.action_id, outcome, reason) for action in hints.actions]
    return [*same, *hints.refusals]


def _joined(first: Hints, second: Hints) -> Hints:
    actions: tuple[HintAction, ...] = first.actions + second.actions
    reason = f"more than {MAX_ACTIONS} actions in kv_hints and {FIELD}"
    surplus = refused(Hints(actions=actions[MAX_ACTIONS:]), reason).refusals
    name = first.message_id or second.message_id
    return Hints(name, actions[:MAX_ACTIONS], first.refusals + second.refusals + surplus)


def _action_fields(action: object) -> object:
    return _attributes(action, *_ACTION_FIELDS) if hasattr(action, "action_type") else action


def _attributes(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
