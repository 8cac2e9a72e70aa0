"""The rows of a stopping pod: offers to its peers, which read them before the pod ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from time import monotonic

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.peers.peer import Peer

_MAX_REFUSED = 4
"""Refusals in a row after which a peer gets no more offers: it stops, too, or its memory is in use."""

Row = tuple[RowKey, int, bytes]
"""Key, payload bytes per column, and tenant."""


class HandOver:
    """Offers each row to one peer, and to a second one if the first refuses it.

    One thread per peer takes the next row when its peer has answered. So a slow peer gets few rows.
    """

    def __init__(self, rows: Sequence[Row], name: str, deadline: float) -> None:
        """``rows``: the hottest first. ``name``: the name of this pod."""
        self._name, self._deadline = name, deadline
        self._changed = threading.Condition()  # protects the following
        self._rows: Iterator[Row] = iter(rows)
        self._refused: deque[tuple[Row, Peer]] = deque()
        self._num_offered = self._num_taken = 0  # offers without an answer yet; rows that were taken

    def run(self, peers: Sequence[Peer], submit: Callable[..., Future[None]]) -> int:
        """Offer the rows until the deadline. Returns how many were taken. ``submit`` starts a thread."""
        wait([submit(self._offer_to, peer) for peer in peers], max(0.0, self._deadline - monotonic()))
        with self._changed:
            return self._num_taken

    def _offer_to(self, peer: Peer) -> None:
        num_refused = 0
        while num_refused < _MAX_REFUSED:
            row, is_second = self._next(peer)
            if row is None:
                return
            try:
                is_taken = peer.offer(*row, self._name)
            except (TierUnavailableError, ServerError):
                num_refused, is_taken = _MAX_REFUSED, False
            with self._changed:
                self._num_offered -= 1
                self._num_taken += is_taken
                if not is_taken and not is_second:
                    self._refused.append((row, peer))
                self._changed.notify_all()
            num_refused = 0 if is_taken else num_refused + 1

    def _next(self, peer: Peer) -> tuple[Row | None, bool]:
        """Wait for the next row for a peer. Returns it, and whether another peer refused it.

        None: there is no row left, or the deadline has passed.
        """
        with self._changed:
            while (left := self._deadline - monotonic()) > 0:
                row, is_second = self._take(peer)
                if row is not None:
                    self._num_offered += 1
                if row is not None or not self._num_offered:
                    return row, is_second
                self._changed.wait(left)  # another peer may refuse a row
        return None, False

    def _take(self, peer: Peer) -> tuple[Row | None, bool]:
        if self._refused and self._refused[0][1] is not peer:
            return self._refused.popleft()[0], True
        return next(self._rows, None), False
