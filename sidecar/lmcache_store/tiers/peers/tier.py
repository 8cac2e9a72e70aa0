"""A lower tier that reads rows from the memory tiers of other pods. It is never written.

The tier asks all peers at once which of a prompt's rows they have, and waits ``ask_seconds`` at most. It
loads a row from the peer that answered first that it has the row. A peer that is slow, gone or hostile gives
misses: every piece is compared with the checksum that the format has, as for the remote tier.

The tier as a whole is never unavailable: each peer has its own circuit, and a lost peer only loses its rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import monotonic

import xxhash

from lmcache_store.common.recent import Recent
from lmcache_store.tiers.base import Loaded, MediumHealth, ObjectId, RowKey
from lmcache_store.tiers.errors import InvalidObjectError, ServerError, TierUnavailableError
from lmcache_store.tiers.peers.hand_over import HandOver, Row
from lmcache_store.tiers.peers.peer import Peer
from lmcache_store.tiers.remote.address import Endpoint, Tls
from lmcache_store.tiers.stats import ObjectStats

MAX_ASKED = 32
"""Peers to ask about one prompt. Of more, the prompt's first row selects some."""
_MAX_FOUND = 1 << 16
"""Objects whose place is remembered between the question and the load."""
_MAX_WAITING = 4
"""Questions that one peer has not answered yet. It gets no other one until then. A pod asks three at once."""


class PeersHealth(MediumHealth):
    """Health of a tier that is never unavailable as a whole."""

    is_open = False
    num_outages = 0


class PeersTier:
    """See the module's description. Thread-safe.

    ``password`` returns the password for the peers, and may raise OSError; it is called for each connection.
    ``timeout_seconds`` is the deadline of a connection, and of each step of a load. ``tls``: the authority
    of the peers' certificates; None: no TLS.
    """

    takes_writes = False
    is_local = False
    is_encrypted = False
    used_bytes = None
    residence_seconds = math.inf

    def __init__(
        self,
        peers: Sequence[Endpoint] = (),
        *,
        prefix: str,
        password: Callable[[], str] = str,
        tls: Tls | None = None,
        timeout_seconds: float = 1.0,
        ask_seconds: float = 0.005,
    ) -> None:
        self.health = PeersHealth()
        self.stats = ObjectStats()
        self._prefix = prefix
        self._password = password
        self._tls = tls
        self._timeout = timeout_seconds
        self._ask_seconds = ask_seconds
        self._threads = ThreadPoolExecutor(_MAX_WAITING * MAX_ASKED, "peers-ask")  # starts those it needs
        self._lock = threading.Lock()  # protects the following, and the counters
        self._peers: dict[Endpoint, Peer] = {}
        self._found: Recent[ObjectId, Endpoint] = Recent(_MAX_FOUND)
        self.set_peers(peers)

    @property
    def address(self) -> str:
        """The peers, for people."""
        return ", ".join(map(str, self._peers)) or "no peers"

    def set_peers(self, peers: Sequence[Endpoint]) -> None:
        """Switch to another list of peers, without this pod. Peers in both lists keep their connections."""
        with self._lock:
            before = self._peers
            self._peers = {
                each: before.get(each) or Peer(each, self._prefix, self._password, self._timeout, self._tls)
                for each in peers
            }
            added = [peer for each, peer in self._peers.items() if each not in before]
            removed = [peer for each, peer in before.items() if each not in self._peers]
        for peer in removed:
            peer.close()
        for peer in added[:MAX_ASKED]:
            self._threads.submit(peer.connect)

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        """Ask all peers at once. An object is absent if no peer has said in time that it has it."""
        present = [False] * len(ids)
        deadline = monotonic() + self._ask_seconds
        started = {peer: self._start_asking(peer, ids) for peer in self._to_ask(ids)}
        asked = {answer: peer for peer, answer in started.items() if answer is not None}
        waiting = set(asked)
        while waiting and not all(present) and (left := deadline - monotonic()) > 0:
            done, waiting = wait(waiting, left, FIRST_COMPLETED)
            for answer in done:
                self._note_answer(asked[answer], ids, answer, present)
        return present

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """See LowerTier."""
        loaded = None
        peer = self._peer_of(object_id)
        if peer is None and self.find_each([object_id]) == [True]:
            peer = self._peer_of(object_id)
        if peer is not None:
            try:
                loaded = peer.load(object_id, into, length)
            except InvalidObjectError as invalid:
                self._note_failure(object_id, str(invalid))
                return None
            except (ServerError, TierUnavailableError):
                self._note_failure(object_id)
        with self._lock:
            self.stats.hits += loaded is not None
            self.stats.misses += loaded is None
            if loaded is None:
                self._found.pop(object_id, None)
        return loaded

    def note_offer(self, key: RowKey, num_columns: int, endpoint: Endpoint) -> bool:
        """Load a row from this peer next. False: the peer is not in the list."""
        with self._lock:
            if endpoint not in self._peers:
                return False
            for column in range(num_columns):
                self._found[ObjectId(key, column)] = endpoint
        return True

    def hand_over(self, rows: Sequence[Row], name: str, seconds: float) -> int:
        """Offer rows to the peers, which read them from this pod. Returns how many they took in time.

        ``rows``: the hottest first. ``name``: the name of this pod in the peers' lists.
        """
        deadline = monotonic() + seconds
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.is_available][:MAX_ASKED]
        return HandOver(rows, name, deadline).run(peers, self._threads.submit)

    def rate_of(self, keys: Sequence[RowKey]) -> float | None:
        """Return the mean rate of loads from the peers that have these rows. See LowerTier."""
        peers = [self._peer_of(ObjectId(key, 0)) for key in keys]
        rates = [peer.bytes_per_second() for peer in peers if peer is not None]
        if not rates or len(rates) < len(keys) or not all(rates):
            return 0.0
        return len(rates) / sum(1 / rate for rate in rates)

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        """Refuse: other pods' memory is not written."""
        return False

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        """Do nothing: the peers' own engines determine which rows stay."""
        return set()

    def check(self) -> None:
        """See LowerTier. Circuits check themselves."""

    def servers(self) -> list[dict[str, object]]:
        """Return the state of each peer as plain data, for people."""
        with self._lock:
            peers = list(self._peers.values())
        return [{"name": str(peer.endpoint), "problem": peer.problem} for peer in peers]

    def close(self) -> None:
        """Close all connections. The threads that used the tier must have ended."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _peer_of(self, object_id: ObjectId) -> Peer | None:
        """Return the peer that said that it has an object, if the peer is still in the list."""
        with self._lock:
            endpoint = self._found.get(object_id)
            return None if endpoint is None else self._peers.get(endpoint)

    def _to_ask(self, ids: Sequence[ObjectId]) -> list[Peer]:
        """Return the peers that answer questions now; of many, those that the first row selects."""
        with self._lock:
            usable = [
                peer
                for peer in self._peers.values()
                if peer.is_available and len(peer.questions) < _MAX_WAITING
            ]
        return usable if len(usable) <= MAX_ASKED else _select(usable, ids[0].row_key)

    def _start_asking(self, peer: Peer, ids: Sequence[ObjectId]) -> Future[list[bool]] | None:
        """Ask a peer in a thread. None: no thread can be started."""
        question = object()
        with self._lock:
            peer.questions.add(question)
        try:
            return self._threads.submit(self._ask, peer, ids, question)
        except RuntimeError:
            # The pool may still run the question later, in another thread.
            with self._lock:
                peer.questions.discard(question)
            return None

    def _ask(self, peer: Peer, ids: Sequence[ObjectId], question: object) -> list[bool]:
        try:
            return peer.ask(ids)
        finally:
            with self._lock:
                peer.questions.discard(question)

    def _note_answer(
        self, peer: Peer, ids: Sequence[ObjectId], answer: Future[list[bool]], present: list[bool]
    ) -> None:
        with self._lock:
            for number, (object_id, has) in enumerate(zip(ids, answer.result(), strict=True)):
                if has and not present[number]:
                    present[number] = True
                    self._found[object_id] = peer.endpoint

    def _note_failure(self, object_id: ObjectId, reason: str = "") -> None:
        with self._lock:
            self._found.pop(object_id, None)
            if reason:
                self.stats.note_invalid(object_id.row_key, reason)
            else:
                self.stats.failures += 1


def _select(peers: Sequence[Peer], key: RowKey) -> list[Peer]:
    """Return the peers that rendezvous hashing gives for a row."""

    def rank(peer: Peer) -> int:
        return int(xxhash.xxh3_64_intdigest(str(peer.endpoint).encode() + key))

    return sorted(peers, key=rank)[:MAX_ASKED]
