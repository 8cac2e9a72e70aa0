"""Selections of the retrieved tokens that are recomputed: they trade computing time for accuracy.

A segment that was computed alone has KV without attention to the segments before it. Recomputing a token
corrects its own K and V, and thereby what later tokens read. Only the selection of all tokens makes blended
KV exact. The connector of vLLM uses the same selections.
"""

from lmcache_client.blend.selection import (
    BEFORE_LAYERS,
    AllTokens,
    Candidates,
    FirstTokens,
    LargestDeviation,
    MostAttended,
    NoTokens,
    Selection,
    highest,
)

__all__ = [
    "BEFORE_LAYERS",
    "AllTokens",
    "Candidates",
    "FirstTokens",
    "LargestDeviation",
    "MostAttended",
    "NoTokens",
    "Selection",
    "highest",
]
