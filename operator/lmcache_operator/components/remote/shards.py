"""The list of shards that sidecars follow: present shards, and previous ones during a change. Pure.

The list alone determines the shard of a row. So no data has to be moved, and an interrupted change continues
from the list. Shards are numbered: a list of three shards means pods 0, 1 and 2.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import NamedTuple

from lmcache_operator.api.tiers import MAX_SHARDS

WINDOW = timedelta(minutes=15)
"""Time after a change during which sidecars also read the previous shards.

By then, rows in use have been read and written to their present shard. In simulations a longer window gained
nothing after adding shards, and cost more than it gained after removing shards.
"""

_STATE = re.compile(r"([0-9]{1,3})(?: from ([0-9]{1,3}) until (\S{1,40}))?")


class ShardCounts(NamedTuple):
    """The list of shards, as two counts and a time."""

    current: int
    previous: int = 0
    """Number of shards before the change; 0: no change in progress."""
    until: datetime = datetime.min
    """Time until which ``previous`` is read."""

    def __str__(self) -> str:
        before = f" from {self.previous} until {utc(self.until)}" if self.previous else ""
        return f"{self.current}{before}"

    @classmethod
    def parse(cls, text: str) -> ShardCounts | None:
        """Parse the output of ``str``; None for any other text."""
        match = _STATE.fullmatch(text)
        try:
            until = datetime.fromisoformat(match[3]) if match and match[3] else datetime.min
        except ValueError:
            return None
        current, previous = (int(match[1]), int(match[2] or 0)) if match else (0, 0)
        if not 0 < current <= MAX_SHARDS or previous > MAX_SHARDS or (previous and until.tzinfo is None):
            return None
        return cls(current, previous, until)

    def document(self, endpoints: list[str], secure: set[int], authority: str) -> str:
        """The file that sidecars read.

        Args:
            endpoints: HOST:PORT of all servers, by number.
            secure: Numbers of the servers that use TLS.
            authority: Path of the CA certificate, as sidecars see it.
        """

        def listed(endpoints: list[str]) -> str:
            return "".join(f"\n- {endpoint}" for endpoint in endpoints)

        text = f"current:{listed(endpoints[: self.current])}\n"
        if self.previous:
            text += f"previous:{listed(endpoints[: self.previous])}\nuntil: {utc(self.until)}\n"
        if tls := [endpoint for number, endpoint in enumerate(endpoints) if number in secure]:
            text += f"tls:{listed(tls)}\nca: {authority}\n"
        return text


def next_shards(live: ShardCounts | None, wanted: int, ready: set[int], now: datetime) -> ShardCounts:
    """The list that should be in effect now. ``ready``: numbers of the servers that are ready.

    Changes are made one at a time, because rows from two changes ago would be misses. New servers must be
    ready before the list names them, because rows written to a missing server are lost.
    """
    if live is None:
        return ShardCounts(wanted)
    if live.previous and now < live.until:
        # The clock of a new leader may be behind, so bound the window. Until then all rows stay readable.
        return live._replace(until=min(live.until, (now + WINDOW).replace(microsecond=0)))
    if wanted == live.current or not set(range(live.current, wanted)) <= ready:
        return ShardCounts(live.current)
    return ShardCounts(wanted, live.current, (now + WINDOW).replace(microsecond=0))


def utc(time: datetime) -> str:
    """A time in the format of the Kubernetes API."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
