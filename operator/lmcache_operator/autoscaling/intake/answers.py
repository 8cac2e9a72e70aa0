"""Parsing and validation of the sidecars' ``/samples`` and ``/stats`` (docs/reference/samples.md). Pure.

The answers come from users' pods: one invalid part makes the whole answer invalid.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lmcache.curves import HASHES

MAX_KEYS_OF_A_REQUEST = 8192
"""Bound of the keys of one request: twice as many as a lookup of all KV groups has."""

_VERSION = 1
_MAX_NUMBER = 1 << 63
_MIN_BELOW = HASHES >> 20
"""Smallest sampling threshold. No tier needs a lower one, and a curve would stay empty with it."""
_LOADING = "load_bytes_per_second"
_FUTURE_SECONDS = 1.0
"""Tolerance for requests whose time is after that of the answer."""
_PAST_SECONDS = 7 * 86400.0


class InvalidAnswerError(ValueError):
    """A sidecar's answer is invalid; the text names the part."""


class Samples(NamedTuple):
    """Requests in order of arrival. Times are seconds of the pod's own clock."""

    now: float
    """Time of the answer."""
    started: float
    """Start of the ring: another value means that another sidecar answers."""
    namespace: str
    """Namespace of the keys; empty before the first lookup."""
    rate: float
    """Share of the keys that are sampled."""
    next: int
    """Number of samples since the start: the position to continue from in the next request."""
    num_lost: int
    """Samples that were overwritten in the ring or exceeded the limit of this answer."""
    row_bytes: int
    chunk_tokens: int
    times: array[float]
    """Times of the requests."""
    sizes: array[int]
    """Numbers of keys of the requests."""
    keys: array[int]
    """Keys of all requests, in an array: objects would need five times the memory."""

    def requests(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield the time and the keys of each request; the last chunk's key is first."""
        end = 0
        for time, size in zip(self.times, self.sizes, strict=True):
            end += size
            yield time, tuple(self.keys[end - size : end])


class Counts(NamedTuple):
    """Counts since the sidecar started; tokens unless the field says otherwise."""

    looked_up: int = 0
    engine: int = 0
    memory: int = 0
    disk: int = 0
    remote: int = 0
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


def samples(answer: Any, max_keys: int = _MAX_NUMBER) -> Samples:
    """Parse an answer to ``/samples``. Raises InvalidAnswerError.

    Only the latest requests with at most ``max_keys`` keys together are read. The other keys count as lost.
    """
    values = _object(answer, "an answer")
    if not values:
        remedy = "update it (spec.sidecar.image, or spec.images.policy: Follow)"
        raise InvalidAnswerError(f"its sidecar's image lacks /samples: {remedy}")
    if (version := values.get("version")) != _VERSION:
        raise InvalidAnswerError(f"samples have version {version!r}, not {_VERSION}")
    now, started, t0 = (_number(values, name) for name in ("now", "started", "t0"))
    first, following, num_lost = (int(_number(values, name)) for name in ("since", "next", "dropped"))
    below, row_bytes, chunk_tokens = (
        int(_number(values, name, 2.0**64)) for name in ("below", "row_bytes", "chunk_tokens")
    )
    namespace, text = values.get("namespace"), values.get("key")
    offsets, sizes = (_integers(values, name) for name in ("ms", "num"))
    if not isinstance(namespace, str) or len(namespace) > 128 or not isinstance(text, str):
        raise InvalidAnswerError("namespace or key is not a string, or is too long")
    if not _MIN_BELOW <= below <= HASHES or len(offsets) != len(sizes) or following - first < len(sizes):
        raise InvalidAnswerError("below or the number of requests is invalid")
    if sizes and not (namespace and row_bytes and chunk_tokens):
        raise InvalidAnswerError("namespace, row_bytes or chunk_tokens is missing")
    if any(not 0 < size <= MAX_KEYS_OF_A_REQUEST for size in sizes) or 16 * sum(sizes) != len(text):
        raise InvalidAnswerError("the number of keys is invalid")
    times = [t0 + offset / 1000 for offset in offsets]
    if times and not now - _PAST_SECONDS <= min(times) <= max(times) <= now + _FUTURE_SECONDS:
        raise InvalidAnswerError("the time of a request is in the future, or more than a week ago")
    while sizes and sum(sizes) > max_keys:
        num_dropped = max(1, len(sizes) // 8)  # steps of an eighth are exact enough
        num_lost += sum(sizes[:num_dropped])
        times, sizes = times[num_dropped:], sizes[num_dropped:]
    text = text[len(text) - 16 * sum(sizes) :]
    try:
        keys = array("Q", struct.unpack(f">{sum(sizes)}Q", bytes.fromhex(text)))
    except (ValueError, struct.error) as error:
        raise InvalidAnswerError("a key is not 16 hexadecimal digits") from error
    return Samples(
        now, started, namespace, below / HASHES, following, num_lost, row_bytes, chunk_tokens,
        array("d", times), array("l", sizes), keys,
    )  # fmt: skip


def next_request(answer: Any) -> int | None:
    """Return the position after an invalid answer, so that the next request skips its samples."""
    position = answer.get("next") if isinstance(answer, dict) else None
    return position if type(position) is int and 0 <= position < _MAX_NUMBER else None


def figures(answer: Any) -> Figures:
    """Parse an answer to ``/stats``. Raises InvalidAnswerError."""
    values = _object(answer, "an answer")
    memory, lookups = (_object(values.get(name), name) for name in ("memory", "lookups"))
    remote, disk = (_object(values.get(name) or {}, name) for name in ("remote", "disk"))
    hits = _object(lookups.get("hit_tokens"), "hit_tokens")  # it names only tiers with hits
    hit_tokens = [int(_number({name: 0, **hits}, name)) for name in ("engine", "memory", "disk", "remote")]
    looked_up = int(_number(lookups, "lookup_tokens"))
    if sum(hit_tokens) > looked_up:
        raise InvalidAnswerError("hit_tokens exceed lookup_tokens")
    moved = [int(_number({name: 0, **remote}, name)) for name in Counts._fields[5:]]
    rates = ("gpus", "prefill_tokens_per_second", "kv_bytes_per_token", "engine_kv_bytes")
    measured = [_number(lookups, name) for name in rates]
    measured += [_number({_LOADING: 0, **tier}, _LOADING) for tier in (remote, disk)]
    return Figures(
        Counts(looked_up, *hit_tokens, *moved), int(_number(memory, "size_bytes", _MAX_NUMBER / 4)), *measured
    )


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidAnswerError(f"{what} is not an object: the sidecar may have another version")
    return value


def _number(values: Mapping[str, Any], name: str, largest: float = _MAX_NUMBER) -> float:
    value = values.get(name)
    # The bounds also exclude NaN, which is not comparable.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise InvalidAnswerError(f"{name} is invalid: {str(value)[:40]!r}")
    return value


def _integers(values: Mapping[str, Any], name: str) -> list[int]:
    numbers = values.get(name)
    if not isinstance(numbers, list) or any(type(n) is not int or abs(n) >= _MAX_NUMBER for n in numbers):
        raise InvalidAnswerError(f"{name} is not a list of integers")
    return numbers
