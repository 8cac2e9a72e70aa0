"""The remote tier: one Redis or Valkey that many pods share.

**Objects.** One column of a row is stored in parts of at most 4 MiB,
``lmc1:<namespace>:{<key>:<column>}:<part>``, each with its own header. All writers of one name write the same
bytes, so any valid set of parts makes the object, whoever wrote them. Part 0 is written last: it is the
presence marker, and says how many parts there are.

**Trust.** What is read is compared with what was asked for: version, name, column, part, lengths, checksum.
Anything else is a miss, counted by reason. Only names of the form above are ever written; nothing is deleted.

**Sickness.** Whatever goes wrong with the server itself raises TierUnavailable and opens the circuit; from
then on operations raise at once, until ``try_again`` finds it well.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache.tiers.base import RowKey, TierUnavailable, split_row_key
from lmcache.tiers.header import HEADER_BYTES, BadHeader, Header, checksum, parse
from lmcache.tiers.resilience import CircuitBreaker
from lmcache.tiers.resp import Address, Connection, ServerError, command, set_head
from lmcache.tiers.stats import RemoteStats

T = TypeVar("T")

_log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
"""Redis handles one value at a time: larger ones would make all its other clients wait."""

_FIRST_WINDOW = 16  # keys of the first probe; doubles, since a prefix that goes on mostly goes on
_MAX_WINDOW = 1024
_MAX_REWRITE = 4096  # names of invalid objects that are remembered
_STORE_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOPERM"})


class _Invalid(Exception):
    """What stands under this name is not ours; the message is the reason, as it is counted."""


class RemoteTier:
    """Thread-safe. Every method but ``close`` blocks up to the deadline.

    ``timeout_seconds`` is the deadline of one step: a connection, or one part.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float = 1.0, breaker: CircuitBreaker | None = None
    ) -> None:
        self.address = Address.parse(url)
        self.stats = RemoteStats()
        self.breaker = breaker or CircuitBreaker()
        self._timeout = timeout_seconds
        self._lock = threading.Lock()  # protects stats and what follows
        self._idle: list[Connection] = []
        self._most_parts = 1  # of any object read or written
        self._rewrite: dict[tuple[RowKey, int], None] = {}  # found invalid: to be written though present

    def probe(self, keys: Sequence[RowKey], num_columns: int) -> int:
        """Return how many leading rows have all their columns here."""
        return self._run(lambda connection: _probe(connection, keys, num_columns))

    def load(self, key: RowKey, column: int, into: memoryview) -> int | None:
        """Read one column of a row into a slot. Return its payload's length; None: a miss (slot contents
        undefined)."""
        try:
            length = self._run(lambda connection: _load(connection, key, column, into))
        except _Invalid as invalid:
            with self._lock:
                self.stats.invalid[str(invalid)] += 1
                self._rewrite[key, column] = None
                if len(self._rewrite) > _MAX_REWRITE:
                    del self._rewrite[next(iter(self._rewrite))]
            return None
        with self._lock:
            self.stats.hits += length is not None
            self.stats.misses += length is None
            self._most_parts = max(self._most_parts, num_parts(length or 0))
        return length

    def store(self, key: RowKey, column: int, payload: memoryview, label: bytes = b"") -> bool:
        """Write one column of a row, or refresh the age of what is there. False: the server refused it (full,
        say)."""
        is_rewrite = (key, column) in self._rewrite
        result = self._run(
            lambda connection: _store(connection, key, column, payload, label, is_rewrite=is_rewrite)
        )
        with self._lock:
            if isinstance(result, ServerError):
                self.stats.refused[result.code] += 1
                return False
            self.stats.stored += result
            self.stats.touched += not result
            self._rewrite.pop((key, column), None)
            self._most_parts = max(self._most_parts, num_parts(len(payload)))
        return True

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> None:
        """Refresh the age of rows that were hit in a tier above; absent ones are ignored.

        As many parts of each as the largest object had that this tier has read or written.
        """
        if keys:
            self._run(lambda connection: _touch(connection, keys, num_columns, self._most_parts))

    def check(self) -> None:
        """Ask the server whether it is well; if it is not, the log says why, and the circuit opens."""
        with contextlib.suppress(TierUnavailable):
            self._run(lambda connection: connection.call("PING"))

    def try_again(self) -> bool:
        """While the circuit is open: ask the server whether it is well, and close the circuit if so."""
        try:
            self._attempt(lambda connection: connection.call("PING"))
        except (OSError, ServerError) as error:
            self.breaker.failure()
            _log.debug("remote tier %s is still away: %s", self.address, error)
            return False
        self.breaker.trial_succeeded()
        _log.info("remote tier %s is back", self.address)
        return True

    def close(self) -> None:
        """Close all connections; the threads that used them must have ended."""
        while self._idle:
            self._idle.pop().close()

    def _run(self, operation: Callable[[Connection], T]) -> T:
        if self.breaker.is_open:
            raise TierUnavailable(f"remote tier {self.address} is away")
        try:
            result = self._attempt(operation)
        except (OSError, ServerError) as error:
            self.breaker.failure()
            with self._lock:
                self.stats.failures += 1
            _log.warning("remote tier %s: %s", self.address, error)
            raise TierUnavailable(f"remote tier {self.address}: {error}") from error
        self.breaker.success()
        return result

    def _attempt(self, operation: Callable[[Connection], T]) -> T:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            # It may have been closed while idle, by a restart of the server long ago: that says nothing about
            # now.
            with contextlib.suppress(ConnectionError):
                return self._use(connection, operation)
        return self._use(Connection(self.address, self._timeout), operation)

    def _use(self, connection: Connection, operation: Callable[[Connection], T]) -> T:
        try:
            result = operation(connection)
        except BaseException:
            connection.close()  # answers left unread would be taken for the next operation's
            raise
        with self._lock:
            self._idle.append(connection)
        return result


def part_name(key: RowKey, column: int, part: int) -> str:
    """Name one part; all parts of an object share a hash tag."""
    namespace, chunk_key = split_row_key(key)
    return f"lmc1:{namespace.hex()}:{{{chunk_key.hex()}:{column}}}:{part}"


def _probe(connection: Connection, keys: Sequence[RowKey], num_columns: int) -> int:
    present = 0
    window = _FIRST_WINDOW
    while present < len(keys):
        asked = keys[present : present + window]
        markers = ([part_name(key, column, 0) for column in range(num_columns)] for key in asked)
        connection.send(b"".join(command("EXISTS", *names) for names in markers))
        answers = [connection.read_reply() == num_columns for _ in asked]
        if False in answers:
            return present + answers.index(False)
        present += len(asked)
        window = min(2 * window, _MAX_WINDOW)
    return present


def _touch(connection: Connection, keys: Sequence[RowKey], num_columns: int, num_parts: int) -> None:
    for start in range(0, len(keys), _MAX_WINDOW):
        asked = keys[start : start + _MAX_WINDOW]
        names = (
            [part_name(key, c, p) for c in range(num_columns) for p in range(num_parts)] for key in asked
        )
        connection.send(b"".join(command("TOUCH", *row) for row in names))
        for _ in asked:
            connection.read_reply()


def _load(connection: Connection, key: RowKey, column: int, into: memoryview) -> int | None:
    """Return the payload's length; None when there is no such object."""
    first = _read_part(connection, key, column, 0, into)
    if first is None:
        return None
    if first.total_bytes > len(into):
        raise _Invalid("length")
    for part in range(1, first.num_parts):
        header = _read_part(connection, key, column, part, into)
        if header is None:
            raise _Invalid("part")
        if header.total_bytes != first.total_bytes:
            raise _Invalid("length")
    return first.total_bytes


def _read_part(
    connection: Connection, key: RowKey, column: int, part: int, into: memoryview
) -> Header | None:
    """Read one part into its place, and make sure that it is what was asked for. None: there is none."""
    connection.send(command("GET", part_name(key, column, part)))
    try:
        num_bytes = connection.read_bulk_length()
    except ServerError as error:
        if error.code != "WRONGTYPE":
            raise
        raise _Invalid("type") from None
    if num_bytes is None:
        return None
    place = into[part * PART_BYTES : (part + 1) * PART_BYTES]
    length = num_bytes - HEADER_BYTES
    if not 0 <= length <= len(place):
        raise _Invalid("length")
    head = memoryview(bytearray(HEADER_BYTES))
    connection.read_bulk(head, place[:length])
    try:
        header = parse(head)
    except BadHeader:
        raise _Invalid("header") from None
    if (header.key, header.column, header.part) != (key, column, part):
        raise _Invalid("name")
    total = header.total_bytes
    if header.num_parts != num_parts(total) or length != min(PART_BYTES, total - part * PART_BYTES):
        raise _Invalid("length")
    if header.payload_bytes != length or checksum(place[:length]) != header.checksum:
        raise _Invalid("checksum")
    return header


def _store(
    connection: Connection, key: RowKey, column: int, payload: memoryview, label: bytes, *, is_rewrite: bool
) -> bool | ServerError:
    """Return False when all of it was there already, or why the server does not take it."""
    total = num_parts(len(payload))
    names = [part_name(key, column, part) for part in range(total)]
    try:
        if not is_rewrite and connection.call("TOUCH", *names) == total:
            return False
        for part in (*range(1, total), 0):
            content = payload[part * PART_BYTES : (part + 1) * PART_BYTES]
            header = Header(key, column, part, total, len(content), len(payload), checksum(content), label)
            start = set_head(names[part], HEADER_BYTES + len(content)) + header.pack()
            connection.send(start, content, b"\r\n")
            connection.read_reply()
    except ServerError as error:
        if error.code not in _STORE_REFUSALS:
            raise
        return error
    return True


def num_parts(total_bytes: int) -> int:
    """Parts of a payload; an empty one has one, too."""
    return max(1, -(-total_bytes // PART_BYTES))
