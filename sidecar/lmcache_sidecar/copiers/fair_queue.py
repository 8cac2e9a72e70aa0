"""Who is next: clients take turns, one item each, however much each of them asks for. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client, first in first out."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[int, deque[T]] = OrderedDict()  # nobody's is empty; the next one first

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def put(self, client: int, items: Iterable[T]) -> None:
        """Append to a client's."""
        if added := deque(items):
            self._by_client.setdefault(client, deque()).extend(added)

    def take(self, most: int, cost: Callable[[T], int]) -> list[T]:
        """Take items in turn, at least one, as long as their costs are not more than ``most``."""
        taken: list[T] = []
        while self._by_client:
            client, items = next(iter(self._by_client.items()))
            most -= cost(items[0])
            if taken and most < 0:
                break
            taken.append(items.popleft())
            self._by_client.move_to_end(client)
            if not items:
                del self._by_client[client]
        return taken

    def drop(self, client: int, is_dropped: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Take a client's items that are not wanted any more."""
        items = self._by_client.pop(client, deque())
        self.put(client, (item for item in items if not is_dropped(item)))
        return [item for item in items if is_dropped(item)]
