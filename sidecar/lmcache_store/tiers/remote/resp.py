"""A connection that implements the part of the Redis protocol (RESP2) that the remote tier needs.

Values move directly between the stream and the caller's memory. A command and its replies have one deadline.

This module also connects and authenticates. docs/adr/0005 says why it does not use redis-py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from lmcache_store.tiers.errors import InvalidObjectError, ServerError
from lmcache_store.tiers.header import Buffer
from lmcache_store.tiers.remote.address import Address, Endpoint
from lmcache_store.tiers.remote.stream import open_stream

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", int, bytes)

Reply: TypeAlias = "int | bytes | list[Reply] | None"
"""A number, a string of either kind, nil or an array."""

_MAX_LINE_BYTES = 4096
_AUTH_CODES = frozenset({"BUSY", "ERR", "LOADING", "MASTERDOWN", "NOAUTH", "NOPERM", "WRONGPASS"})
_MAX_LENGTH = 1 << 16  # of strings and arrays; pieces are read into the caller's memory
_MAX_DEPTH = 5  # CLUSTER SLOTS: ranges, range, server, host names, name
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RespConnection:
    """One connection to one server, used by one thread at a time.

    Raises TimeoutError and ConnectionError (both OSError), and ServerError for error replies. After an error,
    the connection may be used again if it ``is_reusable``.
    """

    asking = False
    """Send ASKING before each command, so that a server accepts it for a slot that is migrating to it."""

    def __init__(self, endpoint: Endpoint, address: Address, timeout_seconds: float) -> None:
        self.endpoint = endpoint
        self.prefix = address.prefix
        """First part of all names."""
        self._num_due = 0  # replies to read
        self._line = bytearray()  # received bytes that are not yet consumed
        self._stream = open_stream(endpoint, timeout_seconds, address.tls)
        try:
            if address.password:
                self.authenticate(address.username, address.password)
            if address.database:
                self.call("SELECT", str(address.database))
        except BaseException:
            self.close()
            raise

    @property
    def is_reusable(self) -> bool:
        """Have all replies been read? If not, the next command would get an old reply."""
        return self._num_due == 0 and not self._line

    def close(self) -> None:
        """Close the socket."""
        self._stream.close()

    def authenticate(self, username: str, password: str) -> None:
        """Authenticate, by default as the default user.

        Errors repeat only known codes of the reply: the rest may hold the password."""
        try:
            self.call("AUTH", *((username, password) if username else (password,)))
        except ServerError as error:
            code = error.code if error.code in _AUTH_CODES else "an error"
            raise ServerError(f"{code} was the answer to AUTH") from None
        except (TimeoutError, ConnectionResetError):
            raise
        except ConnectionError:
            raise ConnectionError("the answer to AUTH can't be read") from None

    def call(self, *words: str) -> Reply:
        """Send one command of short words, and read its reply."""
        self.ask([words])
        return self.read_reply()

    def call_all(self, commands: Sequence[Sequence[str | bytes]]) -> list[Reply | ServerError]:
        """Send commands together, and read all replies. Error replies are values in the list."""
        self.ask(commands)
        return self.read_replies(len(commands))

    def call_for_numbers(self, commands: Sequence[Sequence[str]]) -> list[int]:
        """Send commands together, and read a number for each. Raises ServerError for an error reply."""
        self.ask(commands)
        return [self._read_number() for _ in commands]

    def read_replies(self, number: int) -> list[Reply | ServerError]:
        """Read replies of any kind. Error replies are values in the list."""
        replies: list[Reply | ServerError] = []
        for _ in range(number):
            try:
                replies.append(self.read_reply())
            except ServerError as error:
                replies.append(error)
        return replies

    def ask(self, commands: Sequence[Sequence[str | bytes]]) -> None:
        """Send commands of short words. The caller must read a reply to each."""
        self._send([b"".join(self._start() + _encode(words) for words in commands)])

    def set_fields(self, name: str, fields: Mapping[str, Sequence[Buffer]]) -> None:
        """Send an HSET of values in several buffers, without a copy. The caller must read a reply."""
        buffers: list[Buffer] = [self._start() + _encode(("HSET", name), 2 * len(fields))]
        for field, value in fields.items():
            buffers += [_encode_bulk(field) + b"$%d\r\n" % sum(map(len, value)), *value, b"\r\n"]
        self._send(buffers)

    def read_reply(self) -> Reply:
        """Read one reply of any kind. Raises ConnectionError if it is too large or nested too deep."""
        self._skip_asking()
        reply = self._read_any(_MAX_DEPTH)
        self._num_due -= 1
        return reply

    def read_array_length(self, expected: int) -> None:
        """Read the head of an array of bulk strings. The caller must read each of them as an element."""
        self._skip_asking()
        line = self._read_line(b"*")
        if _length(line) != expected:
            raise ConnectionError(f"unexpected reply {line[:32]!r}")
        self._num_due += expected - 1

    def read_bulk_length(self, *, is_element: bool = False) -> int | None:
        """Read the head of a bulk string. Call ``read_bulk`` next. None: there is no value."""
        if not is_element:
            self._skip_asking()
        length = _length(self._read_line(b"$"))
        self._num_due -= length is None
        return length

    def read_bulk(self, *targets: memoryview) -> None:
        """Read a bulk string into the targets, which must have its length together."""
        self._read_content(*targets)
        self._num_due -= 1

    def read_strings(self, limit: int, max_bytes: int) -> list[bytes]:
        """Read an array of at most ``limit`` strings. No other reply may be due: this reads far ahead.

        Raises InvalidObjectError, without reading it, if a string has more than ``max_bytes`` bytes.
        """
        self._skip_asking()
        head = self._read_line(b"*")
        number = _length(head)
        if number is None or number > limit:
            raise ConnectionError(f"unexpected reply {head[:32]!r}")
        self._num_due += 1  # the rest of the array
        strings = []
        for _ in range(number):
            length = _length(self._read_line(b"$", ahead=_MAX_LENGTH))
            if length is None or length > max_bytes:
                raise InvalidObjectError("length")
            while len(self._line) < length + 2:
                self._line += self._stream.receive_some(_MAX_LENGTH)
            strings.append(bytes(self._line[:length]))
            del self._line[: length + 2]
        self._num_due -= 2
        return strings

    def _read_number(self) -> int:
        self._skip_asking()
        number = _number(self._read_line(b":")[1:])
        self._num_due -= 1
        return number

    def _start(self) -> bytes:
        """Return the bytes to send before a command, and count its replies."""
        self._num_due += 2 if self.asking else 1
        return _ASKING if self.asking else b""

    def _skip_asking(self) -> None:
        if self.asking:
            self._read_line(b"+")
            self._num_due -= 1

    def _read_any(self, depth: int) -> Reply:
        line = self._read_line(b"+", b":", b"$", b"*")
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return _number(line[1:])
        length = _length(line)
        if length is None:
            return None
        if length > _MAX_LENGTH or not depth:
            raise ConnectionError(f"unexpected reply {line[:32]!r}")
        if kind == b"*":
            self._num_due += 1  # the rest of the array, in case an element is an error
            array = [self._read_any(depth - 1) for _ in range(length)]
            self._num_due -= 1
            return array
        content = bytearray(length)
        self._read_content(memoryview(content))
        return bytes(content)

    def _read_line(self, *kinds: bytes, ahead: int = 64) -> bytes:
        """Read a line that starts with one of these bytes. Reads little ahead, to copy little."""
        while (end := self._line.find(b"\r\n")) < 0:
            if len(self._line) > _MAX_LINE_BYTES:
                raise ConnectionError("the server does not speak RESP")
            self._line += self._stream.receive_some(ahead)
        line = bytes(self._line[:end])
        del self._line[: end + 2]
        if line[:1] == b"-":
            self._num_due -= 1
            raise ServerError(line[1:].decode(errors="replace"))
        if line[:1] not in kinds:
            raise ConnectionError(f"unexpected reply {line[:32]!r}")
        return line

    def _read_content(self, *targets: memoryview) -> None:
        """Read a bulk string after its head, in one system call if possible."""
        end, views = bytearray(2), []
        for target in (*targets, memoryview(end)):
            ahead = min(len(self._line), len(target))
            target[:ahead] = self._line[:ahead]
            del self._line[:ahead]
            views.append(target[ahead:])
        self._stream.fill(views)
        if end != b"\r\n":
            raise ConnectionError("a bulk string does not end after its announced length")

    def _send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, and start the deadline, which also covers the replies."""
        self._stream.start()
        try:
            self._stream.send_all(buffers)
        except ConnectionError:
            self._read_farewell()
            raise

    def _read_farewell(self) -> None:
        """Raise the ServerError, if any, with which the server explained why it closed the connection."""
        self._num_due += 1  # in any case, this connection is not reusable
        with contextlib.suppress(OSError):
            while True:  # replies to earlier commands
                self._read_line(b"+")


def _encode(words: Sequence[str | bytes], num_more: int = 0) -> bytes:
    """Encode the start of a command of these words and ``num_more`` others."""
    return b"*%d\r\n" % (len(words) + num_more) + b"".join(map(_encode_bulk, words))


def _encode_bulk(word: str | bytes) -> bytes:
    encoded = word.encode() if isinstance(word, str) else word
    return b"$%d\r\n%s\r\n" % (len(encoded), encoded)


def _length(line: bytes) -> int | None:
    """Parse the length of a string or an array; None for nil."""
    length = _number(line[1:])
    if length < -1:
        raise ConnectionError(f"unexpected reply {line[:32]!r}")
    return None if length < 0 else length


def _number(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ConnectionError(f"unexpected reply {digits[:32]!r}") from None
