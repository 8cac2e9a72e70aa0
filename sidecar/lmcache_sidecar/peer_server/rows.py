"""The rows that this sidecar serves to other pods: those of its memory tier, read by the server's threads.

One event loop owns the memory tier. Each question and each pin therefore takes a turn of that loop. A row
from before a restart is verified before it is pinned.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.base import ObjectId, RowKey
from lmcache_store.tiers.memory.contracts import Slot
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.address import parse_endpoints
from lmcache_store.tiers.tiered.store import TieredStore

T = TypeVar("T")

TIER_NAME = "peers"


class PinnedMemoryRow:
    """A pinned row of one store. ``release`` may be called in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: TieredStore, slot: Slot) -> None:
        self.columns = store.memory.payloads(slot)
        self._loop, self._store, self._slot = loop, store, slot

    @property
    def is_lost(self) -> bool:
        """May the row have lost its bytes? If so after a read, the bytes may be wrong."""
        return self._store.memory.arena.is_lost

    def release(self) -> None:
        """End the pin."""
        self.columns = []
        try:
            self._loop.call_soon_threadsafe(self._store.end_read, self._slot)
        except RuntimeError:  # the loop is closed, and with it the store
            return


class PeerRows:
    """Rows of the present store; ``store`` returns None while there is none.

    ``tier``: the tier over the other pods, which reads the rows that they offer. None: offers are refused.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Callable[[], TieredStore | None],
        tier: PeersTier | None = None,
    ) -> None:
        self._loop = loop
        self._store = store
        self._tier = tier

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Say of each object whether it can be read now."""

        async def find() -> list[bool]:
            store = self._store()
            if store is None or store.is_closed:
                return [False] * len(ids)
            num_columns = store.memory.arena.table.num_columns
            return [each.column < num_columns and store.can_be_read(each.row_key) for each in ids]

        return self._in_loop(find, lambda _: None, TIMING.peer_turn_seconds) or [False] * len(ids)

    def pin(self, key: RowKey) -> PinnedMemoryRow | None:
        """Pin a row, once it is verified; None if it can't be read."""

        async def pin() -> PinnedMemoryRow | None:
            store = self._store()
            slot = await store.begin_read(key) if store is not None else None
            if store is None or slot is None:
                return None
            try:
                return PinnedMemoryRow(self._loop, store, slot)
            except BaseException:
                store.end_read(slot)
                raise

        def unpin(row: PinnedMemoryRow | None) -> None:
            if row is not None:
                row.release()

        return self._in_loop(pin, unpin, TIMING.peer_turn_seconds)

    def take_over(self, key: RowKey, length: int, tenant: bytes, peer: str) -> bool:
        """Read a row from the peer that offers it, and wait for the result. False: refused."""

        async def take_over() -> bool:
            store = self._store()
            if store is None or self._tier is None:
                return False
            is_known = self._tier.note_offer(key, store.memory.arena.table.num_columns, endpoint)
            return is_known and await store.take_over(key, length, tenant, TIER_NAME)

        try:
            (endpoint,) = parse_endpoints([peer])
        except ValueError:
            return False
        return bool(self._in_loop(take_over, lambda _: None, TIMING.peer_offer_seconds))

    def _in_loop(
        self, action: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], None], seconds: float
    ) -> T | None:
        """Return the result of ``action`` in the loop. None if it takes too long; it is then undone."""
        result: Future[T] = Future()

        async def act() -> None:
            value = await action()
            if result.set_running_or_notify_cancel():
                result.set_result(value)
            else:
                undo(value)

        acting = act()
        try:
            asyncio.run_coroutine_threadsafe(acting, self._loop).result(seconds)
        except (NotYet, CancelledError):
            if not result.cancel():
                undo(result.result())
            return None
        except RuntimeError:  # the loop is closed
            acting.close()
            return None
        return result.result()
