"""A dictionary that remembers what was set last, and no more than so many keys. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The ``capacity`` keys that were set last, the oldest first; what is read keeps its age.

    For what is known about keys of others, whose number nothing bounds: to forget the oldest costs a little
    work.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._capacity:
            self.popitem(last=False)
