"""How full a server is and how soon it forgets, from what INFO says. Pure.

Redis says neither how many bytes were written nor how old its oldest value is. It says how many bytes it
received, and next to values all other commands are small: a server that evicts keeps what nobody uses for as
long as it takes to receive as much as it has room for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

QUESTIONS = ("PING",), ("INFO", "memory"), ("INFO", "stats")
"""PING, since a user may be forbidden INFO, and the server well."""

_FIELD = re.compile(rb"^(used_memory|maxmemory|evicted_keys|total_net_input_bytes):([0-9]{1,19})\r?$", re.M)


class Usage(NamedTuple):
    """Of one server's memory, whoever's the values are."""

    at: float
    """When it was asked, in seconds."""
    used_bytes: int
    max_bytes: int
    """Beyond this it evicts; 0: it has no such bound."""
    num_evicted: int
    """Values, since its start."""
    received_bytes: int
    """Since its start."""

    @classmethod
    def parse(cls, replies: Sequence[object], now: float) -> Usage | None:
        """Read the answers to ``QUESTIONS``. None: it does not say."""
        text = b"\n".join(reply for reply in replies if isinstance(reply, bytes))
        said = {name: int(value) for name, value in _FIELD.findall(text)}
        names = b"used_memory", b"maxmemory", b"evicted_keys", b"total_net_input_bytes"
        return cls(now, *map(said.__getitem__, names)) if said.keys() >= set(names) else None

    def residence_seconds(self, before: Usage) -> float:
        """How long a value that nobody uses stays here, as it went since ``before``; infinite: not known."""
        received = self.received_bytes - before.received_bytes
        if received <= 0 or not self.max_bytes:  # fewer than before: it was restarted
            return math.inf
        return self.max_bytes * (self.at - before.at) / received
