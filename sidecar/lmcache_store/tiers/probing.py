"""Leading rows of a prompt that a medium holds, in few round trips."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_store.tiers.base import ObjectId, RowKey

_FIRST_WINDOW = 16  # rows of the first question; doubles, because a longer prefix is likely even longer
_MAX_WINDOW = 1024


def num_leading(
    find_each: Callable[[Sequence[ObjectId]], Sequence[bool]], keys: Sequence[RowKey], num_columns: int
) -> int:
    """Return how many leading rows have all their columns, by what ``find_each`` says."""
    present, window = 0, _FIRST_WINDOW
    while present < len(keys):
        asked = keys[present : present + window]
        is_present = find_each([ObjectId(key, c) for key in asked for c in range(num_columns)])
        if False in is_present:
            return present + list(is_present).index(False) // num_columns
        present += len(asked)
        window = min(2 * window, _MAX_WINDOW)
    return present
