"""Authentication of the link between two parts of a group. Pure.

::

    leader    lmcache-group/1 NAME NONCE
    follower  RANK NODES REVISION NAME NONCE
    follower  MAC join
    leader    MAC welcome, or MAC refuse REASON
    both      MAC beat, ...

Both parts derive the link's key from the group's key and the first two lines. So the key depends on rank,
number of nodes and both nonces, and no line of another link is valid. Each later line has a MAC
over its direction, its number and its text. The first MAC proves that its sender knows the secret, which
itself is never sent.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

PROTOCOL = "lmcache-group/1"
MAX_LINE_BYTES = 1024
LEADER = 0
"""Rank of the first part."""
_MAX_TEXT_CHARACTERS = 400
_FOREIGN = f"does not speak {PROTOCOL}; all pods of a group need the same release"


class LinkError(ValueError):
    """A line that breaks the protocol. The message is a clause whose subject is the sender."""


class PartIdentity(NamedTuple):
    """Rank and name of a part, and the group that it expects. No text may be empty or contain a blank."""

    rank: int
    nodes: int
    revision: str
    """Revision of the pod template."""
    name: str
    """Name of the pod."""


def hello(identity: PartIdentity, nonce: str) -> bytes:
    """Return the first line of a follower."""
    return f"{identity.rank} {identity.nodes} {identity.revision} {identity.name} {nonce}\n".encode()


def read_hello(line: bytes) -> PartIdentity:
    """Parse the first line of a follower. Raises LinkError."""
    match line.decode("ascii", "replace").split():
        case [rank, nodes, revision, name, _] if rank.isdigit() and nodes.isdigit():
            return PartIdentity(int(rank), int(nodes), revision, name)
    raise LinkError(_FOREIGN)


def greeting(name: str, nonce: str) -> bytes:
    """Return the first line of a leader."""
    return f"{PROTOCOL} {name} {nonce}\n".encode()


def read_greeting(line: bytes) -> str:
    """Return the leader's name. Raises LinkError."""
    match line.decode("ascii", "replace").split():
        case [protocol, name, _] if protocol == PROTOCOL:
            return name
    raise LinkError(_FOREIGN)


class Channel:
    """Seals and opens the later lines of a link, which must arrive complete and in order."""

    def __init__(self, key: bytes, first_lines: bytes, *, is_leader: bool) -> None:
        """``first_lines``: the first line of the leader and that of the follower, as sent."""
        self._key = hmac.digest(key, first_lines, "sha256")
        self._is_leader = is_leader
        self._num_sent = self._num_received = 0

    def seal(self, text: str) -> bytes:
        """Return the line for a message. Other characters than printable ASCII are replaced."""
        plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_MAX_TEXT_CHARACTERS])
        self._num_sent += 1
        return f"{self._mac(self._is_leader, self._num_sent, plain)} {plain}\n".encode()

    def open(self, line: bytes) -> str:
        """Return the message of a line. Raises LinkError if it is not the next line of the other part."""
        mac, _, text = line[:-1].decode("ascii", "replace").partition(" ")
        self._num_received += 1
        expected = self._mac(not self._is_leader, self._num_received, text)
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            raise LinkError("did not prove that it knows the group's secret")
        return text

    def _mac(self, is_from_leader: bool, number: int, text: str) -> str:
        return hmac.digest(self._key, f"{is_from_leader} {number} {text}".encode(), "sha256").hex()
