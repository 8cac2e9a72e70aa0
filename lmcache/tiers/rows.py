"""What the memory tier knows about one row that is not free."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lmcache.tiers.base import RowKey, Slot
from lmcache.tiers.slots import NO_CHECKSUM, State


@dataclass(slots=True, eq=False)
class Row:
    """A row, and who uses it."""

    key: RowKey
    slot: Slot
    depth: int  # position in its chain
    request: Hashable  # that it was stored for
    writers: dict[int, bytes | None] = field(default_factory=dict)  # column -> owner, None in quarantine
    committed: set[int] = field(default_factory=set)  # columns
    num_leases: int = 0
    num_pins: int = 0
    visible: bool = False  # complete and in the index
    spoilt: bool = False  # out of the index for good
    unverified: bool = False  # adopted, checksum not compared yet
    adopted: bool = False  # a client from before the restart may be reading it

    @property
    def is_unused(self) -> bool:
        """Does nobody write, read or pin it?"""
        return not (self.writers or self.num_leases or self.num_pins)


def adopted_row(number: int, entries: NDArray[np.void]) -> Row:
    """Make a row of the entries that an earlier process left: visible if they are whole, else spoilt."""
    newest = entries[int(entries["generation"].argmax())]
    slot = Slot(number, int(newest["generation"]))
    row = Row(newest["key"].tobytes(), slot, depth=0, request=object(), adopted=True)
    if _is_whole(entries):
        row.committed.update(range(len(entries)))
        row.visible = row.unverified = True
    else:
        row.spoilt = True
    return row


def _is_whole(entries: NDArray[np.void]) -> bool:
    """Do the entries of one row belong together, committed and with checksums?"""
    return bool(
        (entries["state"] == State.COMMITTED).all()
        and (entries["generation"] == entries["generation"][0]).all()
        and (entries["key"] == entries["key"][0]).all()
        and not any(entry.tobytes() == NO_CHECKSUM for entry in entries["checksum"])
    )
