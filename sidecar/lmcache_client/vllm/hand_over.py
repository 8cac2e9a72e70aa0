"""Hand-over of a prompt from a prefill engine to a decode engine, by vLLM's ``kv_transfer_params``.

A router sends a prompt to a prefill engine with ``do_remote_decode``. It passes the ``kv_transfer_params`` of
the answer to a decode engine, together with the prompt::

    {"lmcache": {"namespace": "5f2c...", "num_tokens": 8192}}

The prefill engine answers as soon as it has computed the prompt, while it still stores the last chunks. The
decode engine would take them for misses and compute them. With the hand-over, it waits for them: 0.2 s for
the next row, and no longer than computing them would take (``waiting.RowWait.is_overdue``).

Answers whose prompt was blended say so in the same object (``blend.scheduler``).

A client can write anything into these fields. A wrong hand-over costs its own request a short wait, and lower
tiers a few more questions.
"""

from __future__ import annotations

from typing import Any

FIELD = "lmcache"
"""Key in ``kv_transfer_params``. In a MultiConnector, the keys of all children must differ."""


def wants_hand_over(params: Any) -> bool:
    """Return True if another engine will continue the request with these ``kv_transfer_params``."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def announce(namespace: bytes, num_tokens: int) -> dict[str, Any]:
    """Return ``kv_transfer_params`` that announce the KV of the first ``num_tokens`` tokens of a prompt."""
    return {FIELD: {"namespace": namespace.hex(), "num_tokens": num_tokens}}


def num_announced_tokens(params: Any, namespace: bytes) -> int:
    """Return how many leading tokens were announced for this namespace. Never raises."""
    announced = params.get(FIELD) if isinstance(params, dict) else None
    if not isinstance(announced, dict) or announced.get("namespace") != namespace.hex():
        return 0
    num_tokens = announced.get("num_tokens")
    return num_tokens if type(num_tokens) is int and num_tokens > 0 else 0
