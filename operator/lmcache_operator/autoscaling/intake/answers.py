"""Parsing and validation of the sidecars' ``/stats``. Pure.

The answers come from users' pods: one invalid part makes the whole answer invalid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lmcache_store.curves.answers import MAX_NUMBER, InvalidAnswerError, number_of, object_of

_LOADING = "load_bytes_per_second"


class Counts(NamedTuple):
    """Counts since the sidecar started; tokens unless the field says otherwise."""

    looked_up: int = 0
    engine: int = 0
    memory: int = 0
    disk: int = 0
    remote: int = 0
    peers: int = 0
    """In the memory tiers of other pods."""
    written: int = 0
    """Rows written to the remote tier, or found there."""
    stored: int = 0
    """Objects of these rows that were sent."""
    touched: int = 0
    """Objects of these rows that the remote tier already had."""
    promoted: int = 0
    """Rows read from the remote tier."""


class Figures(NamedTuple):
    """Figures that a sidecar measures; 0 while it has not measured one."""

    counts: Counts
    size_bytes: int
    """Bytes of its memory tier."""
    gpus: float
    prefill_tokens_per_second: float
    kv_bytes_per_token: float
    """KV bytes of one token, over all ranks."""
    engine_bytes: float
    """Bytes of the engine's own prefix cache."""
    remote_bytes_per_second: float = 0.0
    """Speed of loads from the remote tier."""
    disk_bytes_per_second: float = 0.0


NOTHING = Figures(Counts(), 0, 0, 0, 0, 0)
"""Figures of a sidecar that was not polled yet."""


def figures(answer: Any) -> Figures:
    """Parse an answer to ``/stats``. Raises InvalidAnswerError."""
    values = object_of(answer, "an answer")
    memory, lookups = (object_of(values.get(name), name) for name in ("memory", "lookups"))
    remote, disk = (object_of(values.get(name) or {}, name) for name in ("remote", "disk"))
    hits = object_of(lookups.get("hit_tokens"), "hit_tokens")  # it names only tiers with hits
    hit_tokens = [int(number_of({name: 0, **hits}, name)) for name in Counts._fields[1:6]]
    looked_up = int(number_of(lookups, "lookup_tokens"))
    if sum(hit_tokens) > looked_up:
        raise InvalidAnswerError("hit_tokens exceed lookup_tokens")
    moved = [int(number_of({name: 0, **remote}, name)) for name in Counts._fields[6:]]
    rates = ("gpus", "prefill_tokens_per_second", "kv_bytes_per_token", "engine_kv_bytes")
    measured = [number_of(lookups, name) for name in rates]
    measured += [number_of({_LOADING: 0, **tier}, _LOADING) for tier in (remote, disk)]
    return Figures(
        Counts(looked_up, *hit_tokens, *moved),
        int(number_of(memory, "size_bytes", MAX_NUMBER / 4)),
        *measured,
    )
