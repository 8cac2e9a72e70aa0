"""Which shards there are, and who they were before a change: the list that sidecars follow. Pure.

A row's shard follows from the list alone, so that nothing has to be moved, and a change that is interrupted
anywhere goes on from what the list says. Shards are numbered: a list of three is those of pods 0, 1 and 2.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import NamedTuple

from lmcache_operator.api.tiers import MAX_SHARDS

WINDOW = timedelta(minutes=15)
"""How long the shards before a change are read. By then what is in use was read and written to its present
one; longer gains nothing when shards come, and costs more than it brings when they go (simulated)."""

_STATE = re.compile(r"([0-9]{1,3})(?: from ([0-9]{1,3}) until (\S{1,40}))?")


class Shards(NamedTuple):
    """The list, as numbers of shards."""

    current: int
    previous: int = 0
    """Before the change; 0: none is under way."""
    until: datetime = datetime.min
    """When ``previous`` is not read any more."""

    def __str__(self) -> str:
        before = f" from {self.previous} until {utc(self.until)}" if self.previous else ""
        return f"{self.current}{before}"

    @classmethod
    def parse(cls, text: str) -> Shards | None:
        """Read what ``str`` wrote; None for anything else."""
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
        """The file that sidecars read; ``endpoints``: of all servers, ``secure``: the numbers of those that
        speak TLS, ``authority``: file with who signed their certificates."""

        def listed(endpoints: list[str]) -> str:
            return "".join(f"\n- {endpoint}" for endpoint in endpoints)

        text = f"current:{listed(endpoints[: self.current])}\n"
        if self.previous:
            text += f"previous:{listed(endpoints[: self.previous])}\nuntil: {utc(self.until)}\n"
        if tls := [endpoint for number, endpoint in enumerate(endpoints) if number in secure]:
            text += f"tls:{listed(tls)}\nca: {authority}\n"
        return text


def next_shards(live: Shards | None, wanted: int, ready: set[int], now: datetime) -> Shards:
    """The list as it should be now. ``ready``: the servers that are.

    One change at a time: what was two changes ago would not be found. Servers that come have to be there
    first: what is written to one that is not is lost.
    """
    if live is None:
        return Shards(wanted)
    if live.previous and now < live.until:
        # The clock of an operator that took over may be behind. Rows of the former shards are still read.
        return live._replace(until=min(live.until, (now + WINDOW).replace(microsecond=0)))
    if wanted == live.current or not set(range(live.current, wanted)) <= ready:
        return Shards(live.current)
    return Shards(wanted, live.current, (now + WINDOW).replace(microsecond=0))


def utc(time: datetime) -> str:
    """As the API writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
