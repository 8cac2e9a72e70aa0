"""The causes of prompt tokens, with their titles. Pure."""

from __future__ import annotations

from collections.abc import Mapping

HITS: Mapping[str, str] = {
    "engine": "the engine's own cache",
    "memory": "memory tier",
    "disk": "disk tier",
    "peers": "memory tiers of other pods",
    "remote": "remote tier",
    "blended": "documents at another position",
}
"""Causes of tokens that were not computed, the fastest first."""

TIERS = ("memory", "disk", "peers", "remote")
"""Tiers among these causes."""

LOWER_TIERS = TIERS[1:]

COMPUTED: Mapping[str, str] = {
    "new": "new: no earlier prompt had them",
    "diverged": "diverged: an earlier prompt began alike, then differed",
    "evicted": "evicted: an earlier prompt stored them",
    "being_stored": "an earlier request was still storing them",
    "store_refused": "not stored: memory was full of rows in use or guaranteed to others",
    "not_stored": "not stored: the engine did not store them",
    "too_late": "a lower tier had them, but not in time",
    "slower_than_computing": "loading was slower than computing",
    "tier_unavailable": "the lower tier was unavailable",
    "invalid": "the stored copy was damaged",
    "load_failed": "the load from memory failed",
    "recomputed": "recomputed: chosen tokens of documents at another position",
    "private": "evicted: private keys, so lower tiers hold no copy",
    "not_cacheable": "the request cannot be cached",
    "tail": "tail: less than a chunk, or the last token",
}
"""Causes of computed tokens."""

CAUSES = {**HITS, **COMPUTED}


def num_computed(tokens: Mapping[str, int]) -> int:
    """Return the computed tokens of all tokens by cause."""
    return sum(number for cause, number in tokens.items() if cause not in HITS)
