"""/metrics: Prometheus text (format 0.0.4), made of counts of calls, which are kept here, and of the stats.

It is written by hand: the usual library would be a fifth of the start, cost a call more than the call's own
bookkeeping, and make the text in one piece, for which lookups would wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import grpc

_BOUNDS_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)

Sample = tuple[str, dict[str, str], float]
"""What follows the family's name, the labels, the value."""


class CallMetrics:
    """Calls of the engine by method."""

    def __init__(self) -> None:
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_SECONDS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._ended: Counter[tuple[str, str]] = Counter()

    def took(self, method: str, seconds: float) -> None:
        """A call was answered."""
        self._buckets[method][bisect_left(_BOUNDS_SECONDS, seconds)] += 1
        self._seconds[method] += seconds

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """A call ended."""
        self._ended[method, code.name] += 1

    def text(self) -> str:
        """Both families."""
        ended = [("", {"code": code, "method": method}, n) for (method, code), n in self._ended.items()]
        about = "Time from a call's arrival to its answer, in the sidecar, in seconds"
        return _text("lmcache_request_seconds", "histogram", about, self._histogram()) + _text(
            "lmcache_requests_total", "counter", "Calls by gRPC status; Attach when its stream ends", ended
        )

    def _histogram(self) -> Iterator[Sample]:
        for method, counts in self._buckets.items():
            for bound, total in zip((*_BOUNDS_SECONDS, "+Inf"), accumulate(counts), strict=True):
                yield "_bucket", {"le": str(bound), "method": method}, total
            yield "_count", {"method": method}, sum(counts)
            yield "_sum", {"method": method}, self._seconds[method]


class Family(NamedTuple):
    """A metric that is read from the stats."""

    name: str  # a counter if it ends in _total
    path: str  # of a number, or, if there is a label, of numbers by the label's value
    label: str
    about: str

    def text(self, stats: Mapping[str, Any]) -> str:
        """All its lines; a part of the stats that is not there (yet) reads as 0."""
        value: Any = stats
        for key in self.path.split("."):
            value = (value or {}).get(key)
        numbers = (value or {}).items() if self.label else [("", value or 0)]
        samples: list[Sample] = [("", {self.label: name} if name else {}, number) for name, number in numbers]
        return _text(self.name, "counter" if self.name.endswith("_total") else "gauge", self.about, samples)


FAMILIES = tuple(
    Family(f"lmcache_{name}", path, label, about)
    for name, path, label, about in (
        ("uptime_seconds", "uptime_seconds", "", "Seconds since the start"),
        ("clients", "num_clients", "state", "Clients; quarantined: stream lost, death not proven"),
        ("memory_tier_capacity_bytes", "memory.capacity_bytes", "", "Bytes when all is populated"),
        ("memory_tier_ready_bytes", "memory.ready_bytes", "", "Populated bytes"),
        ("memory_tier_bytes", "memory.used_bytes", "", "Bytes of rows in use, counted as whole rows"),
        ("memory_tier_rows", "memory.used_rows", "", "Rows (chunks of all ranks) in use"),
        ("memory_tier_leased_rows", "memory.leased_rows", "", "Rows under a lease"),
        ("quarantined_slots", "memory.quarantined_slots", "", "Slots whose reuse is not proven safe"),
        ("memory_tier_hits_total", "memory.hits", "", "Rows that lookups found in memory"),
        ("memory_tier_misses_total", "memory.misses", "", "Rows that lookups did not find there"),
        ("memory_tier_refused_total", "memory.refused", "", "Reservations without a row to free"),
        ("memory_tier_removals_total", "memory.removed", "reason", "Rows that left, by reason"),
        ("remote_tier_up", "remote.is_reachable", "", "1 if the remote tier answers, as far as known"),
        ("remote_tier_operations_total", "remote.operations", "result", "Columns read or written"),
        ("write_queue_rows", "num_queued_writes", "", "Rows still to be written through"),
        ("writes_total", "writes", "result", "Rows written through, or why not"),
        ("promotions_total", "promotions", "result", "Rows brought up from the remote tier, or verified"),
    )
)


def _process() -> str:
    """The numbers under which dashboards look for any process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return "".join(
        _text(f"process_{name}", kind, about, [("", {}, number)])
        for name, kind, about, number in (
            ("cpu_seconds_total", "counter", "User and system CPU seconds", time.process_time()),
            ("resident_memory_bytes", "gauge", "Bytes in memory", pages * os.sysconf("SC_PAGE_SIZE")),
            ("open_fds", "gauge", "Open file descriptors", len(os.listdir("/proc/self/fd"))),
        )
    )


def _text(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for suffix, labels, number in samples:
        # JSON escapes quotes, backslashes and line ends as this format does.
        pairs = ",".join(
            f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in labels.items()
        )
        lines.append(f"{name}{suffix}{pairs and f'{{{pairs}}}'} {float(number)}")
    return "\n".join([*lines, ""])


async def render(calls: CallMetrics, stats: Mapping[str, Any]) -> bytes:
    """The whole text, family by family: other tasks run in between, so that no lookup waits for a scrape."""
    makers: list[Callable[[], str]] = [calls.text, _process]
    parts = []
    for make in (*makers, *(lambda family=family: family.text(stats) for family in FAMILIES)):
        parts.append(make())
        await asyncio.sleep(0)
    return "".join(parts).encode()
