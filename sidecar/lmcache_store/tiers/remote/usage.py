"""Memory usage and residence time of a server, from its INFO. Pure.

Redis reports neither the bytes written nor the age of its oldest value. It reports the bytes received, and
commands other than writes of values are small. A server that evicts therefore keeps an unused value until it
has received as many bytes as it can hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

QUESTIONS = ("PING",), ("INFO", "memory"), ("INFO", "stats")
"""Commands to send. PING works even if the user may not call INFO."""

_FIELD = re.compile(rb"^(used_memory|maxmemory|evicted_keys|total_net_input_bytes):([0-9]{1,19})\r?$", re.M)
_POLICY = re.compile(rb"^maxmemory_policy:([a-z-]{1,32})\r?$", re.M)


class Usage(NamedTuple):
    """Memory usage of one server, by all its clients."""

    asked_at: float
    """Time of the reply, in seconds."""
    used_bytes: int
    max_bytes: int
    """Limit beyond which the server evicts; 0: no limit."""
    num_evicted: int
    """Values evicted since the server's start."""
    received_bytes: int
    """Bytes received since the server's start."""
    policy: str = ""
    """Eviction policy, such as allkeys-lru; empty: the server does not report it."""
    answer_seconds: float = 0.0
    """Time that the server took to answer ``QUESTIONS``, including the network."""

    @classmethod
    def parse(cls, replies: Sequence[object], now: float, answer_seconds: float = 0.0) -> Usage | None:
        """Parse the replies to ``QUESTIONS``. None: the server does not report its usage."""
        text = b"\n".join(reply for reply in replies if isinstance(reply, bytes))
        reported = {name: int(value) for name, value in _FIELD.findall(text)}
        names = b"used_memory", b"maxmemory", b"evicted_keys", b"total_net_input_bytes"
        if not reported.keys() >= set(names):
            return None
        policy = (*_POLICY.findall(text), b"")[0].decode()
        used_bytes, max_bytes, num_evicted, received_bytes = map(reported.__getitem__, names)
        return cls(now, used_bytes, max_bytes, num_evicted, received_bytes, policy, answer_seconds)

    def residence_seconds(self, before: Usage) -> float:
        """Return how long an unused value stays, at the rate since ``before``; infinite if unknown."""
        received = self.received_bytes - before.received_bytes
        if received <= 0 or not self.max_bytes:  # negative: the server was restarted
            return math.inf
        return self.max_bytes * (self.asked_at - before.asked_at) / received
