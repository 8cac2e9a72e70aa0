"""Requests that a peer server reads: commands of the Redis protocol (RESP2), as the client sends them.

Everything is bounded, because anyone who reaches the port may send anything.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_WORDS = 5
"""Words of a command: OFFER has a name, a length, a peer and maybe a tenant."""
MAX_WORD_BYTES = 512
"""Length of a word. A name has 64 bytes for the prefix at most, and 132 more. A password may be longer."""
_MAX_LINE_BYTES = 8
"""Length of a line that holds a number."""
_RECEIVE_BYTES = 64 << 10

Command = list[bytes]


class BadRequestError(Exception):
    """The bytes are not a command. The connection can't be used any more."""


class Requests:
    """Commands that arrive over one connection. ``receive`` returns between one byte and its argument."""

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._bytes = b""
        self._start = 0  # of the bytes that are not consumed

    def read(self) -> list[Command]:
        """Wait for a command. Returns all commands that have arrived.

        Raises BadRequestError, and what ``receive`` raises.
        """
        commands: list[Command] = []
        while not commands:
            self._bytes = self._bytes[self._start :] + self._receive(_RECEIVE_BYTES)
            self._start = 0
            while (command := self._next()) is not None:
                commands.append(command)
        return commands

    def _next(self) -> Command | None:
        """Consume one command; None if it is not complete."""
        position = self._start
        if (head := self._number(position, b"*")) is None:
            return None
        number, position = head
        if not 1 <= number <= MAX_WORDS:
            raise BadRequestError(f"a command of {number} words")
        words: Command = []
        for _ in range(number):
            if (head := self._number(position, b"$")) is None:
                return None
            length, position = head
            if not 0 <= length <= MAX_WORD_BYTES:
                raise BadRequestError(f"a word of {length} bytes")
            end = position + length
            if len(self._bytes) < end + 2:
                return None
            if self._bytes[end : end + 2] != b"\r\n":
                raise BadRequestError("a word that does not end after its length")
            words.append(self._bytes[position:end])
            position = end + 2
        self._start = position
        return words

    def _number(self, position: int, kind: bytes) -> tuple[int, int] | None:
        """Read a line of ``kind`` and a number. Returns the number and the line's end; None: not complete."""
        end = self._bytes.find(b"\r\n", position, position + _MAX_LINE_BYTES)
        if end < 0:
            if len(self._bytes) - position >= _MAX_LINE_BYTES:
                raise BadRequestError("a line that is no number")
            return None
        line = self._bytes[position:end]
        if line[:1] != kind or not line[1:].isdigit():
            raise BadRequestError("a line that is no number")
        return int(line[1:]), end + 2
