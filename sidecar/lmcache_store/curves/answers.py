"""Parsing and validation of a sidecar's ``/samples`` (docs/reference/samples.md). Pure.

The answers come from users' pods: one invalid part makes the whole answer invalid.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lmcache_store.curves.samples import HASHES

MAX_KEYS_OF_A_REQUEST = 8192
"""Bound of the keys of one request: twice as many as a lookup of all KV groups has."""

MAX_NUMBER = 1 << 63
"""Largest number in an answer."""

_VERSION = 1
_MIN_BELOW = HASHES >> 20
"""Smallest sampling threshold. No tier needs a lower one, and a curve would stay empty with it."""
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


def samples(answer: Any, max_keys: int = MAX_NUMBER) -> Samples:
    """Parse an answer to ``/samples``. Raises InvalidAnswerError.

    Only the latest requests with at most ``max_keys`` keys together are read. The other keys count as lost.
    """
    values = object_of(answer, "an answer")
    if (version := values.get("version")) != _VERSION:
        raise InvalidAnswerError(f"samples have version {version!r}, not {_VERSION}")
    now, started, t0 = (number_of(values, name) for name in ("now", "started", "t0"))
    first, following, num_lost = (int(number_of(values, name)) for name in ("since", "next", "dropped"))
    below, row_bytes, chunk_tokens = (
        int(number_of(values, name, 2.0**64)) for name in ("below", "row_bytes", "chunk_tokens")
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
    return position if type(position) is int and 0 <= position < MAX_NUMBER else None


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return a JSON object. Raises InvalidAnswerError for any other value."""
    if not isinstance(value, dict):
        raise InvalidAnswerError(f"{what} is not an object: the sidecar may have another version")
    return value


def number_of(values: Mapping[str, Any], name: str, largest: float = MAX_NUMBER) -> float:
    """Return a number of an object, from 0 to ``largest``. Raises InvalidAnswerError."""
    value = values.get(name)
    # The bounds also exclude NaN, which is not comparable.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise InvalidAnswerError(f"{name} is invalid: {str(value)[:40]!r}")
    return value


def _integers(values: Mapping[str, Any], name: str) -> list[int]:
    numbers = values.get(name)
    if not isinstance(numbers, list) or any(type(n) is not int or abs(n) >= MAX_NUMBER for n in numbers):
        raise InvalidAnswerError(f"{name} is not a list of integers")
    return numbers
