"""A fair queue: clients take turns, one item each, however many items each of them has queued. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client, first in first out within each client."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[int, deque[T]] = OrderedDict()  # next client first; none is empty

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def put(self, client: int, items: Iterable[T]) -> None:
        """Append items to the queue of one client."""
        if added := deque(items):
            self._by_client.setdefault(client, deque()).extend(added)

    def take(self, max_cost: int, cost: Callable[[T], int]) -> list[T]:
        """Take items in turn: at least one, and more while the sum of costs stays within ``max_cost``."""
        taken: list[T] = []
        while self._by_client:
            client, items = next(iter(self._by_client.items()))
            max_cost -= cost(items[0])
            if taken and max_cost < 0:
                break
            taken.append(items.popleft())
            self._by_client.move_to_end(client)
            if not items:
                del self._by_client[client]
        return taken

    def drop(self, client: int, is_dropped: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Remove and return the items of a client for which ``is_dropped`` is true."""
        items = self._by_client.pop(client, deque())
        self.put(client, (item for item in items if not is_dropped(item)))
        return [item for item in items if is_dropped(item)]
