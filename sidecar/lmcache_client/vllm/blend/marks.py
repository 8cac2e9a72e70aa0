"""Finds known documents in a prompt by their first tokens.

A **mark** names a document in 8 bytes: the upper 40 bits are a **fingerprint** of its first ``START_TOKENS``
tokens, and the lower 24 bits are its length in tokens. A mark only proposes a place: the rows of the document
prove that the tokens are the same. So a wrong mark costs a lookup, and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lmcache_client.vllm.blend.params import MAX_DOCUMENTS

START_TOKENS = 64
"""Tokens that a fingerprint covers. Shorter documents have no mark."""
MAX_FINGERPRINTS = 131_072
MAX_LENGTHS = 8
"""Lengths of documents with the same first tokens. A new length replaces the oldest one."""
_LENGTH_BITS, _BUCKET_BITS = 24, 22
_UPPER_SHIFT = 64 - _LENGTH_BITS - _BUCKET_BITS
_LOWER = (1 << _BUCKET_BITS) - 1
_BLOCK = 1 << 14
"""Starts that are hashed together. Their numbers fit into a processor's cache."""
_BASE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
_BITS = (1 << 64) - 1
_FULL = 255  # a bucket with so many fingerprints is never emptied

Hashes = npt.NDArray[np.uint64]
_Lengths = dict[int, tuple[int, ...]]


def _powers(base: int, number: int) -> Hashes:
    factors = np.full(number, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


_POWERS = _powers(_BASE, _BLOCK + START_TOKENS)
_INVERSES = _powers(pow(_BASE, -1, 1 << 64), _BLOCK)


def seed_of(namespace: bytes, cache_salt: str | None) -> int:
    """Return the seed of fingerprints, so that models and tenants never match marks of one another."""
    salt = (cache_salt or "").encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(b"document" + namespace + salt).digest()[:8], "little")


def make_mark(tokens: Sequence[int], num_tokens: int, seed: int) -> int | None:
    """Return the mark of a document, or None if the document is too short or too long for a mark.

    ``tokens``: the document's tokens, at least the first ``START_TOKENS``.
    """
    if not START_TOKENS <= num_tokens < 1 << _LENGTH_BITS:
        return None
    return int(_hashes(tokens[:START_TOKENS], seed)[0]) >> _LENGTH_BITS << _LENGTH_BITS | num_tokens


class MarkTable:
    """A bounded set of marks. The fingerprint that was least recently added leaves first.

    ``find`` may run while another thread changes the table. Two threads must not change it at the same time.
    """

    def __init__(self, max_fingerprints: int = MAX_FINGERPRINTS) -> None:
        self._max_fingerprints = max_fingerprints
        self._lengths: _Lengths = {}  # of each fingerprint, the latest length last
        # A filter, made with the first mark. Each fingerprint is in two buckets. The bits say which buckets
        # are filled: unlike the counts, they fit into a processor's cache.
        self._counts = bytearray()  # fingerprints in each bucket, up to _FULL
        self._bits = bytearray()

    def __len__(self) -> int:
        """Return the number of fingerprints."""
        return len(self._lengths)

    def add(self, marks: Iterable[int]) -> None:
        """Add marks, each a 64-bit number. Ignores marks of documents that are too short."""
        lengths = self._lengths
        for mark in marks:
            fingerprint, length = mark >> _LENGTH_BITS, mark & ((1 << _LENGTH_BITS) - 1)
            if length < START_TOKENS:
                continue
            earlier = lengths.pop(fingerprint, None)
            if earlier is None:
                self._fill(fingerprint)
                lengths[fingerprint] = (length,)
                if len(lengths) > self._max_fingerprints:
                    self._remove(next(iter(lengths)))
            else:
                earlier = tuple(number for number in earlier if number != length)
                lengths[fingerprint] = (*earlier[1 - MAX_LENGTHS :], length)

    def _fill(self, fingerprint: int) -> None:
        if not self._bits:
            self._counts, self._bits = bytearray(1 << _BUCKET_BITS), bytearray(1 << _BUCKET_BITS - 3)
        counts = self._counts
        for bucket in fingerprint >> _UPPER_SHIFT, fingerprint & _LOWER:
            if counts[bucket] < _FULL:
                counts[bucket] += 1
            self._bits[bucket >> 3] |= 1 << (bucket & 7)

    def _remove(self, fingerprint: int) -> None:
        del self._lengths[fingerprint]
        counts = self._counts
        for bucket in fingerprint >> _UPPER_SHIFT, fingerprint & _LOWER:
            if counts[bucket] < _FULL:
                counts[bucket] -= 1
                if not counts[bucket]:
                    self._bits[bucket >> 3] &= ~(1 << (bucket & 7))

    def clear(self) -> None:
        """Remove all marks."""
        self._lengths, self._counts, self._bits = {}, bytearray(), bytearray()

    def marks(self) -> list[int]:
        """Return all marks, those of the least recently added fingerprint first."""
        return [
            fingerprint << _LENGTH_BITS | length
            for fingerprint, lengths in self._lengths.items()
            for length in lengths
        ]

    def find(self, tokens: Sequence[int], seed: int, more: MarkTable | None = None) -> list[range]:
        """Return the ranges of a prompt that may be known documents: ascending, disjoint, not empty.

        There are at most ``MAX_DOCUMENTS``, and at least one token follows the last one. A document ends
        before the next match if one of its known lengths allows that. Otherwise the longest one counts, or
        it ends at the next match if all are too long. A prompt of 64k tokens takes 1.5 to 3 ms.

        Args:
            tokens: the prompt's tokens.
            seed: see ``seed_of``.
            more: another table whose documents are found, too. They may end too late, so another match ends
                them.
        """
        tables = [table for table in (self, more) if table]
        if not tables or len(tokens) < START_TOKENS:
            return []
        filters = [np.frombuffer(table._bits, np.uint8) for table in tables]
        starts, fingerprints = [], []
        for first in range(0, len(tokens) - START_TOKENS + 1, _BLOCK):
            hashes = _hashes(tokens[first : first + _BLOCK + START_TOKENS - 1], seed)
            matches = _filled(filters, hashes >> np.uint64(64 - _BUCKET_BITS))
            hashes = hashes[matches] >> np.uint64(_LENGTH_BITS)
            in_both = _filled(filters, hashes & np.uint64(_LOWER))
            starts.append(matches[in_both] + first)
            fingerprints.append(hashes[in_both])
        lengths = self._lengths, more._lengths if more else {}
        return _choose(np.concatenate(starts), np.concatenate(fingerprints), *lengths, len(tokens) - 1)


def _filled(filters: Sequence[npt.NDArray[np.uint8]], buckets: Hashes) -> npt.NDArray[np.int64]:
    """Return the indices of the buckets that are filled in one of the filters."""
    places, bits = (buckets >> np.uint64(3)).view(np.int64), np.uint8(1) << (buckets.astype(np.uint8) & 7)
    is_filled = filters[0].take(places) & bits
    for more in filters[1:]:
        is_filled |= more.take(places) & bits
    return np.flatnonzero(is_filled != 0)


def _hashes(tokens: Sequence[int], seed: int) -> Hashes:
    """Return a hash of ``START_TOKENS`` tokens from each start on, for at most ``_BLOCK`` starts."""
    try:
        words = np.frombuffer(array("Q", tokens), np.uint64)
    except OverflowError:  # without a tokenizer, vLLM does not check what a client sends
        words = np.array([token & _BITS for token in tokens], np.uint64)
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words * _POWERS[: len(words)], out=sums[1:])
    hashes = sums[START_TOKENS:] - sums[:-START_TOKENS]
    hashes *= _INVERSES[: len(hashes)]
    hashes += np.uint64(seed)
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):  # splitmix64's finalizer
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def _choose(
    starts: npt.NDArray[np.int64], fingerprints: Hashes, known: _Lengths, more: _Lengths, last: int
) -> list[range]:
    """Return the documents from these ascending starts. Few of the fingerprints are unknown.

    ``known``, ``more``: see ``find``; ``last``: the documents end at this token or before.
    """
    # A repeated token gives a run of equal fingerprints. Each run costs one search.
    is_first = np.ones(len(starts), np.bool_)
    np.not_equal(fingerprints[1:], fingerprints[:-1], out=is_first[1:])
    runs = fingerprints[is_first].tolist()
    is_known = np.any([[fingerprint in lengths for fingerprint in runs] for lengths in (known, more)], axis=0)
    is_match = is_known[np.cumsum(is_first) - 1]
    # The loop reads single numbers: a view gives Python's, and bisect on it costs less than searchsorted.
    places, names = starts[is_match].data, fingerprints[is_match].data
    documents: list[range] = []
    index = 0
    while index < len(places) and len(documents) < MAX_DOCUMENTS:
        start, fingerprint = places[index], names[index]
        limit = places[index + 1] if index + 1 < len(places) else last
        lengths, late = known.get(fingerprint, ()), more.get(fingerprint, ())
        fitting = [length for length in (*lengths, *late) if start + length <= limit]
        fitting = fitting or [length for length in lengths if start + length <= last]
        stop = start + max(fitting, default=0)
        if not fitting:
            following = bisect_left(places, start + START_TOKENS, index)
            stop = places[following] if following < len(places) else last
        documents.append(range(start, stop))
        index = bisect_left(places, stop, index)
    return documents
