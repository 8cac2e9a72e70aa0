"""KV hints: what users want to stay in the cache, to come, or to go. Pure: it turns messages into actions.

An **envelope** is the message that vLLM (0.32 and later) and SGLang (0.5.23 and later) carry with a request.
It has actions, whose types have no fixed meaning upstream::

    {"protocol_version": "1", "message_id": "session 7", "actions": [
        {"action_id": "1", "action_type": "retain", "action_version": "1",
         "payload": {"ttlSeconds": 600, "priority": 10, "prefixTokens": 4096}}]}

- ``retain``: evict the prompt's rows, and those of its answer, after rows that no hint retains.
- ``prefetch``: promote the prompt's rows from lower tiers and other pods to memory now.
- ``release``: evict the prompt's rows first, until a request uses them.

Each action gets one decision. A hint is advice: it never delays, changes or fails its request.
Sources: vLLM 0.32, ``v1/kv_hints/protocol.py``; SGLang 0.5.23, ``srt/managers/kv_hints.py``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_ACTIONS = 32
"""Most actions of one envelope. The others are refused together."""

MAX_ID_CHARACTERS = 128
MAX_PRIORITY = 100
MAX_TOKENS = (1 << 53) - 1
"""Largest number of tokens in a payload: JSON numbers are exact up to here."""

DEFAULT_TTL_SECONDS = 600.0
VERSION = "1"
"""The only version of the actions and of the list of actions."""


class HintKind(enum.Enum):
    """Kind of an action. The values are those of ``action_type``."""

    RETAIN = "retain"
    PREFETCH = "prefetch"
    RELEASE = "release"


class HintOutcome(enum.Enum):
    """Outcome of an action. The values are those of ``outcome`` in answers."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REFUSED = "refused"


class HintAction(NamedTuple):
    """One valid action, for a range of the prompt's tokens."""

    action_id: str
    kind: HintKind
    begin_token: int = 0
    end_token: int = 0
    """First token after the range; 0: to the end of the prompt, and for ``retain`` the answer, too."""
    ttl_seconds: float = DEFAULT_TTL_SECONDS
    priority: int = 0


class HintDecision(NamedTuple):
    """The answer to one action."""

    action_id: str
    outcome: HintOutcome
    reason: str = ""
    """Text that says what was not done and why; empty if the action was accepted."""
    num_tokens: int = 0
    """Tokens of the prompt that the action concerns."""
    ttl_seconds: float = 0.0
    """How long the tokens are retained."""

    def as_json(self) -> dict[str, Any]:
        """Return the decision as answers to users contain it."""
        answer: dict[str, Any] = {"action_id": self.action_id, "outcome": self.outcome.value}
        if self.reason:
            answer["reason"] = self.reason
        if self.num_tokens:
            answer["tokens"] = self.num_tokens
        if self.ttl_seconds:
            answer["ttlSeconds"] = round(self.ttl_seconds, 3)
        return answer


class Hints(NamedTuple):
    """The actions of one envelope, and the decisions about those that are not valid."""

    message_id: str = ""
    actions: tuple[HintAction, ...] = ()
    refusals: tuple[HintDecision, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.actions or self.refusals)


NO_HINTS = Hints()


class _PayloadError(ValueError):
    """A payload that can't be executed; the text says what to write instead."""


def parse_actions(actions: object, message_id: object = "") -> Hints:
    """Return the valid actions of a list, and decisions about the others. Never raises.

    Each action is a mapping with the fields of the envelope. ``action_id`` is its position by default, and
    ``action_version`` is "1". ``payload`` may be left out.
    """
    name = _shown(message_id) if isinstance(message_id, str) else ""
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return Hints(name, refusals=(_refused("", "hints must be a list of actions"),))
    valid: list[HintAction] = []
    refusals: list[HintDecision] = []
    for position, action in enumerate(actions[:MAX_ACTIONS]):
        action_id = str(position)
        try:
            if not isinstance(action, Mapping):
                raise _PayloadError("an action must be an object")
            action_id = _action_id(action.get("action_id", action_id))
            valid.append(_parse_action(action_id, action))
        except _PayloadError as error:
            refusals.append(_refused(action_id, str(error)))
    if (num_left := len(actions) - MAX_ACTIONS) > 0:
        reason = f"{num_left} more actions: send at most {MAX_ACTIONS} with a request"
        refusals.append(_refused("", reason))
    return Hints(name, tuple(valid), tuple(refusals))


def _parse_action(action_id: str, action: Mapping[Any, Any]) -> HintAction:
    kind = _kind(action.get("action_type"))
    version = action.get("action_version", VERSION)
    if version != VERSION:
        raise _PayloadError(f"unknown version {_shown(version)!r} of {kind.value}: use {VERSION!r}")
    payload = action.get("payload", {})
    if not isinstance(payload, Mapping):
        raise _PayloadError("payload must be an object")
    readers = _READERS[kind]
    for key in payload:
        if key not in readers:
            raise _PayloadError(f"unknown field {_shown(key)!r} of {kind.value}: use {', '.join(readers)}")
    fields = {readers[key][0]: readers[key][1](key, value) for key, value in payload.items()}
    parsed = HintAction(action_id, kind, **fields)
    if parsed.end_token and parsed.end_token <= parsed.begin_token:
        raise _PayloadError("prefixTokens must be larger than fromTokens")
    return parsed


def _kind(value: object) -> HintKind:
    try:
        return HintKind(value)
    except ValueError:
        known = ", ".join(kind.value for kind in HintKind)
        raise _PayloadError(f"unknown action type {_shown(value)!r}: the types are {known}") from None


def _action_id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS or not value.isprintable():
        raise _PayloadError(f"action_id must be a text of 1 to {MAX_ID_CHARACTERS} printable characters")
    return value


def _tokens(key: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise _PayloadError(f"{key} must be a whole number of tokens, 0 or more")
    return value


def _num_tokens(key: str, value: object) -> int:
    if not (number := _tokens(key, value)):
        raise _PayloadError(f"{key} must be 1 or more tokens; without it, the whole prompt counts")
    return number


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _PayloadError(f"{key} must be a number of seconds above 0")
    return float(min(value, MAX_TOKENS))


def _priority(key: str, value: object) -> int:
    if type(value) is not int or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise _PayloadError(f"{key} must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


_RANGE = {"prefixTokens": ("end_token", _num_tokens), "fromTokens": ("begin_token", _tokens)}
_READERS: Mapping[HintKind, Mapping[str, tuple[str, Any]]] = {
    HintKind.RETAIN: {
        "ttlSeconds": ("ttl_seconds", _seconds), "priority": ("priority", _priority),
        "prefixTokens": ("end_token", _num_tokens),
    },
    HintKind.PREFETCH: {"prefixTokens": ("end_token", _num_tokens)},
    HintKind.RELEASE: _RANGE,
}  # fmt: skip
"""Field of HintAction and reader of each field of a payload."""


def _refused(action_id: str, reason: str) -> HintDecision:
    return HintDecision(action_id, HintOutcome.REFUSED, reason)


def _shown(value: object) -> str:
    """Return the beginning of a value from outside, without characters that would change a terminal."""
    text = value[:MAX_ID_CHARACTERS] if isinstance(value, str) else type(value).__name__
    return "".join(character if character.isprintable() else "?" for character in text)
