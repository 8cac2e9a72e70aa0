"""What sidecars answer to ``/samples`` and ``/stats`` (docs/reference/samples.md), checked. Pure.

It comes from pods of users: an answer that makes no sense anywhere is refused whole.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lmcache.curves import HASHES

MAX_KEYS_OF_A_REQUEST = 8192
"""Twice what a lookup of all KV groups takes."""

_VERSION = 1
_LARGEST = 1 << 63
_LEAST_BELOW = HASHES >> 20
"""No tier is so large; a curve that was sampled by so little would know nothing for ever."""
_LOADING = "load_bytes_per_second"
_FUTURE_SECONDS = 1.0
"""By which a request may be later than the answer that tells of it."""
_PAST_SECONDS = 7 * 86400.0


class RefusedAnswerError(ValueError):
    """What a sidecar said makes no sense; the text says what."""


class Samples(NamedTuple):
    """Requests in the order in which they came; times are seconds of the pod's own clock."""

    now: float
    """When it was answered."""
    started: float
    """When the ring began: another value, another sidecar."""
    namespace: str
    """Empty: nothing was looked up yet."""
    rate: float
    """Share of the keys that is sampled."""
    next: int
    """How many samples there were: where to go on the next time."""
    num_lost: int
    """Samples that had left the ring, or were too many to be read."""
    row_bytes: int
    chunk_tokens: int
    times: array[float]
    """Of requests."""
    sizes: array[int]
    """How many keys they have."""
    keys: array[int]
    """Of all requests; as objects they would take five times as much until all pods have answered."""

    def requests(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Time and keys, tail first."""
        end = 0
        for time, size in zip(self.times, self.sizes, strict=True):
            end += size
            yield time, tuple(self.keys[end - size : end])


class Counts(NamedTuple):
    """Of tokens, since the sidecar started, unless said."""

    looked_up: int = 0
    engine: int = 0
    memory: int = 0
    disk: int = 0
    remote: int = 0
    written: int = 0
    """Rows that the remote tier has, or had already."""
    stored: int = 0
    """Parts of these that were sent to it."""
    touched: int = 0
    """Parts that it had already."""
    promoted: int = 0
    """Rows read from the remote tier."""


class Figures(NamedTuple):
    """What a sidecar measures; 0 for what it does not know yet."""

    counts: Counts
    size_bytes: int
    """Of its memory tier."""
    gpus: float
    prefill_tokens_per_second: float
    kv_bytes_per_token: float
    """Over all ranks."""
    engine_bytes: float
    """Of the engines' own prefix caches."""
    remote_bytes_per_second: float = 0.0
    """That it loads from the remote tier."""
    disk_bytes_per_second: float = 0.0


NOTHING = Figures(Counts(), 0, 0, 0, 0, 0)
"""Of a sidecar that was not asked yet."""


def samples(answer: Any, most: int = _LARGEST) -> Samples:
    """Of the latest requests, with no more than ``most`` keys together: the others are lost. Raises
    RefusedAnswerError."""
    values = _object(answer, "an answer")
    if not values:
        raise RefusedAnswerError("its image is of before sidecars told what is looked up")
    if (version := values.get("version")) != _VERSION:
        raise RefusedAnswerError(f"version {version!r} of samples, not {_VERSION}")
    now, started, t0 = (_number(values, name) for name in ("now", "started", "t0"))
    first, following, num_lost = (int(_number(values, name)) for name in ("since", "next", "dropped"))
    below, row_bytes, chunk_tokens = (
        int(_number(values, name, 2.0**64)) for name in ("below", "row_bytes", "chunk_tokens")
    )
    namespace, text = values.get("namespace"), values.get("key")
    offsets, sizes = (_integers(values, name) for name in ("ms", "num"))
    if not isinstance(namespace, str) or len(namespace) > 128 or not isinstance(text, str):
        raise RefusedAnswerError("namespace or key is no text, or too long")
    if not _LEAST_BELOW <= below <= HASHES or len(offsets) != len(sizes) or following - first < len(sizes):
        raise RefusedAnswerError("below, or the number of requests")
    if sizes and not (namespace and row_bytes and chunk_tokens):
        raise RefusedAnswerError("requests, but no namespace, row_bytes or chunk_tokens")
    if any(not 0 < size <= MAX_KEYS_OF_A_REQUEST for size in sizes) or 16 * sum(sizes) != len(text):
        raise RefusedAnswerError("the number of keys")
    times = [t0 + offset / 1000 for offset in offsets]
    if times and not now - _PAST_SECONDS <= min(times) <= max(times) <= now + _FUTURE_SECONDS:
        raise RefusedAnswerError("a request from the future, or of a week ago")
    while sizes and sum(sizes) > most:
        num_left = max(1, len(sizes) // 8)  # an eighth at a time is near enough
        num_lost += sum(sizes[:num_left])
        times, sizes = times[num_left:], sizes[num_left:]
    text = text[len(text) - 16 * sum(sizes) :]
    try:
        keys = array("Q", struct.unpack(f">{sum(sizes)}Q", bytes.fromhex(text)))
    except (ValueError, struct.error) as error:
        raise RefusedAnswerError("a key is not 16 hexadecimal digits") from error
    return Samples(
        now, started, namespace, below / HASHES, following, num_lost, row_bytes, chunk_tokens,
        array("d", times), array("l", sizes), keys,
    )  # fmt: skip


def next_request(answer: Any) -> int | None:
    """Where to go on after an answer that was refused, so that the next one is another."""
    found = answer.get("next") if isinstance(answer, dict) else None
    return found if type(found) is int and 0 <= found < _LARGEST else None


def figures(answer: Any) -> Figures:
    """Raises RefusedAnswerError."""
    values = _object(answer, "an answer")
    memory, lookups = (_object(values.get(name), name) for name in ("memory", "lookups"))
    remote, disk = (_object(values.get(name) or {}, name) for name in ("remote", "disk"))
    hits = _object(lookups.get("hit_tokens"), "hit_tokens")  # of tiers in which something was found
    found = [int(_number({name: 0, **hits}, name)) for name in ("engine", "memory", "disk", "remote")]
    looked_up = int(_number(lookups, "lookup_tokens"))
    if sum(found) > looked_up:
        raise RefusedAnswerError("more tokens were found than looked up")
    moved = [int(_number({name: 0, **remote}, name)) for name in Counts._fields[5:]]
    rates = ("gpus", "prefill_tokens_per_second", "kv_bytes_per_token", "engine_kv_bytes")
    measured = [_number(lookups, name) for name in rates]
    measured += [_number({_LOADING: 0, **tier}, _LOADING) for tier in (remote, disk)]
    return Figures(
        Counts(looked_up, *found, *moved), int(_number(memory, "size_bytes", _LARGEST / 4)), *measured
    )


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RefusedAnswerError(f"{what} is no object: is the sidecar of an older version?")
    return value


def _number(values: Mapping[str, Any], name: str, largest: float = _LARGEST) -> float:
    value = values.get(name)
    # Not every number that is not an integer can be compared: NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise RefusedAnswerError(f"{name} is {str(value)[:40]!r}")
    return value


def _integers(values: Mapping[str, Any], name: str) -> list[int]:
    found = values.get(name)
    if not isinstance(found, list) or not all(type(one) is int and abs(one) < _LARGEST for one in found):
        raise RefusedAnswerError(f"{name} is no list of integers")
    return found
