"""Finds the leading rows of a prompt that a tier holds, in few round trips."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_store.tiers.base import LowerTier, ObjectId, RowKey

_FIRST_WINDOW = 16  # rows of the first question; doubles, because a longer prefix is likely even longer
_MAX_WINDOW = 1024


def num_leading(tier: LowerTier, keys: Sequence[RowKey], num_columns: int) -> int:
    """Return how many leading rows have all their columns.

    A local tier is asked for one row at a time, and for none behind an absent one.
    """
    present, window = 0, 1 if tier.is_local else _FIRST_WINDOW
    while present < len(keys):
        asked = keys[present : present + window]
        is_present = tier.find_each([ObjectId(key, c) for key in asked for c in range(num_columns)])
        if False in is_present:
            return present + list(is_present).index(False) // num_columns
        present += len(asked)
        window = 1 if tier.is_local else min(2 * window, _MAX_WINDOW)
    return present
