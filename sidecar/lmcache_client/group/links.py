"""Authenticated connections between the launchers of a group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable
from typing import TypeVar

from lmcache_client.group import channel
from lmcache_client.group.channel import LinkError, PartIdentity
from lmcache_client.group.part import SILENCE_SECONDS
from lmcache_client.group.settings import Settings

T = TypeVar("T")


class PartLink:
    """A connection whose other side has sent its first line. Each message proves that it knows the secret."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sealing: channel.Channel
    ) -> None:
        self._reader, self._writer, self._sealing = reader, writer, sealing

    def send(self, text: str) -> None:
        """Send a message without waiting. A part that reads nothing is soon silent, and loses its link."""
        self._writer.write(self._sealing.seal(text))

    async def receive(self) -> str:
        """Return the next message. Raises LinkError."""
        return self._sealing.open(await _line(self._reader))

    def close(self) -> None:
        """Send the rest, and close the connection."""
        self._writer.close()


async def in_time(attempt: Awaitable[T]) -> T:
    """Return the result of an attempt to connect. Raises ValueError if it fails or takes too long."""
    try:
        return await asyncio.wait_for(attempt, SILENCE_SECONDS)
    except asyncio.TimeoutError:  # this is an OSError in some versions of Python
        raise LinkError(f"did not answer within {SILENCE_SECONDS:g} s") from None
    except OSError as error:
        # asyncio has texts of its own for errors of the kernel, whose numbers are positive.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise LinkError(f"cannot connect: {reason or error}") from None


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy a connection's data to another one until either side closes."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def welcome(
    settings: Settings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[PartIdentity, PartLink]:
    """Authenticate a follower on a new connection to the leader. Raises ValueError if it is a stranger."""
    greeting = channel.greeting(settings.identity.name, secrets.token_hex(16))
    writer.write(greeting)
    line = await _line(reader)
    identity = channel.read_hello(line)
    link = PartLink(reader, writer, channel.Channel(settings.key(), greeting + line, is_leader=True))
    await link.receive()
    return identity, link


async def join(settings: Settings) -> tuple[str, PartLink]:
    """Connect to the leader, and return its name.

    Raises OSError, or ValueError if the leader is a stranger or refuses this part.
    """
    # With addresses of two families, one that does not answer must not take all of the time.
    reader, writer = await asyncio.open_connection(
        settings.leader, settings.port, limit=channel.MAX_LINE_BYTES, happy_eyeballs_delay=0.25
    )
    try:
        line = await _line(reader)
        name = channel.read_greeting(line)
        hello = channel.hello(settings.identity, secrets.token_hex(16))
        writer.write(hello)
        link = PartLink(reader, writer, channel.Channel(settings.key(), line + hello, is_leader=False))
        link.send("join")
        word, _, reason = (await link.receive()).partition(" ")
        if word != "welcome":
            raise LinkError(f"refuses this part, because {reason}")
    except BaseException:
        writer.close()
        raise
    return name, link


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError:
        raise LinkError("sent a line that is too long") from None
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        raise LinkError("closed its link")
    return line
