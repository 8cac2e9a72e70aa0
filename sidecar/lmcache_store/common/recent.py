"""A bounded dictionary of the keys that were set most recently. Pure: no I/O and no locks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Dictionary of the ``capacity`` keys that were set most recently, oldest first.

    Reads don't change the order. Use it for facts about an unbounded number of keys, if a forgotten fact
    costs only a little extra work.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._capacity:
            self.popitem(last=False)
