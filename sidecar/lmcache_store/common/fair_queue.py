"""A fair queue: clients or tenants take turns, one item each, however many items each has queued. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client, first in first out within each client."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[Hashable, deque[T]] = OrderedDict()  # next client first; none is empty

    def __bool__(self) -> bool:
        return bool(self._by_client)

    @property
    def clients(self) -> list[Hashable]:
        """Clients with queued items, the next one first."""
        return list(self._by_client)

    def put(self, client: Hashable, items: Iterable[T]) -> None:
        """Append items to the queue of one client."""
        if added := deque(items):
            self._by_client.setdefault(client, deque()).extend(added)

    @property
    def next_item(self) -> T:
        """The item that ``take_next`` returns next. The queue must not be empty."""
        return next(iter(self._by_client.values()))[0]

    def take_next(self) -> T:
        """Take the next item; its client's turn is over. The queue must not be empty."""
        client, items = next(iter(self._by_client.items()))
        item = items.popleft()
        self._by_client.move_to_end(client)
        if not items:
            del self._by_client[client]
        return item

    def drop(self, client: Hashable, is_dropped: Callable[[T], bool] = lambda _: True) -> list[T]:
        """Remove and return the items of a client for which ``is_dropped`` is true."""
        items = self._by_client.pop(client, deque())
        self.put(client, (item for item in items if not is_dropped(item)))
        return [item for item in items if is_dropped(item)]
