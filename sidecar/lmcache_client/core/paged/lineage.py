"""Names chains of pages that are stored in several calls. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lmcache_store.common.recent import Recent

_MAX_CHAINS = 8192


class Lineage:
    """Gives a store the name of the store whose pages come directly before its own.

    The memory tier evicts the rows of one name from their end, so that the head of a prompt is evicted last.
    """

    def __init__(self) -> None:
        self._chains: Recent[bytes, int] = Recent(_MAX_CHAINS)  # by the hash of the chain's last page
        self._numbers = itertools.count()

    def of(self, prefix: Sequence[bytes], hashes: Sequence[bytes]) -> int:
        """Return the number of the chain that these pages continue, or a new number."""
        number = self._chains.get(prefix[-1]) if prefix else None
        if number is None:
            number = next(self._numbers)
        self._chains[hashes[-1]] = number
        return number
