"""Lines of containers' logs: parsing, choice, and order by time. Pure.

Logs come from users' pods and are not trusted: lines have a maximum length, and control characters never
reach the terminal.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lmcache_operator.components.injection.profile import SIDECARS
from lmcache_operator.specs import Object

ENGINE, SIDECAR, OPERATOR = COMPONENTS = ("engine", "sidecar", "operator")
_MAX_LINE_BYTES = 16 << 10
_CUT = " [line cut]"
_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_RECORD = re.compile(r"\{|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
"""Begin of a record of the operator, as text or JSON. Other lines continue the record, as in a traceback."""
_OVERHEAD_BYTES = 200
"""Memory of a line in addition to its text."""
EARLIEST = datetime.min.replace(tzinfo=UTC)


class Source(NamedTuple):
    """One container whose log is read."""

    component: str
    namespace: str
    pod: str
    container: str
    uid: str = ""
    """Identity of the pod. A later pod can have the same name."""

    def __str__(self) -> str:
        return f"{self.pod}/{self.container}"


class Line(NamedTuple):
    """One line of a log."""

    time: datetime
    source: Source
    message: str

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the line."""
        return len(self.message) + _OVERHEAD_BYTES

    def document(self) -> dict[str, Any]:
        """Return the line as plain data. Its fields are stable: programs may read them."""
        time = self.time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        source = self.source._asdict()
        source.pop("uid")
        return {"version": 1, "time": time, **source, "message": self.message}


def sources_of(pod: Object, components: Iterable[str], *, is_previous: bool = False) -> Iterator[Source]:
    """Yield the engine and the sidecar of a pod.

    ``is_previous``: only containers that restarted, because others have no previous log.
    """
    metadata, spec, chosen = pod["metadata"], pod["spec"], set(components)
    containers = [(item["name"], ENGINE) for item in spec.get("containers") or ()]
    containers += [
        (item["name"], SIDECAR) for item in spec.get("initContainers") or () if item["name"] in SIDECARS
    ]
    restarts = _restarts(pod)
    for name, component in containers:
        component = SIDECAR if name in SIDECARS else component
        if component in chosen and (restarts.get(name) or not is_previous):
            yield Source(component, metadata["namespace"], metadata["name"], name, metadata["uid"])


def operator_sources(pod: Object, *, is_previous: bool = False) -> Iterator[Source]:
    """Yield the containers of a pod of the operator."""
    metadata, restarts = pod["metadata"], _restarts(pod)
    for container in pod["spec"].get("containers") or ():
        name = container["name"]
        if restarts.get(name) or not is_previous:
            yield Source(OPERATOR, metadata["namespace"], metadata["name"], name, metadata["uid"])


def _restarts(pod: Object) -> Mapping[str, int]:
    status = pod.get("status") or {}
    listed = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return {container["name"]: container.get("restartCount", 0) for container in listed}


class Splitter:
    """Splits a stream of bytes into lines of limited length."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._is_cut = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete."""
        *complete, last = data.split(b"\n")
        for part in complete:
            self._add(part)
            yield self.end()
        self._add(last)

    def end(self) -> bytes:
        """Return the line that is not complete, and forget it."""
        line = bytes(self._rest) + (_CUT.encode() if self._is_cut else b"")
        self._rest.clear()
        self._is_cut = False
        return line

    def _add(self, part: bytes) -> None:
        room = _MAX_LINE_BYTES - len(self._rest)
        self._is_cut |= len(part) > room
        self._rest += part[: max(0, room)]


class Parser:
    """Parses the lines of one source. Chooses those of the operator that are about one cluster."""

    def __init__(self, source: Source, namespace: str, cluster: str) -> None:
        self._source = source
        self.last = EARLIEST
        """Time of the last line."""
        about = re.escape(f"{namespace}/{cluster}")
        self._about = re.compile(rf"(?<![\w./-]){about}(?![\w-]|[./]\w)")
        self._is_chosen = source.component != OPERATOR

    def parse(self, raw: bytes, *, after: datetime = EARLIEST) -> Line | None:
        """Return a line; None if it is not chosen, or not newer than ``after``."""
        stamp, _, text = raw.decode(errors="replace").partition(" ")
        time = _time(stamp)
        if time is None:  # not a line of the kubelet: an error message in the stream
            time, text = self.last, f"{stamp} {text}".rstrip()
        message = clean(text)
        self.last = max(time, self.last)
        if self._source.component == OPERATOR and _RECORD.match(message):
            self._is_chosen = bool(self._about.search(message))
        return Line(time, self._source, message) if self._is_chosen and time > after else None


def _time(stamp: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return time if time.tzinfo else None


def clean(text: str) -> str:
    """Return a text without escape sequences of terminals, and with other control characters escaped."""
    without = _ESCAPE_SEQUENCES.sub("", text.rstrip("\r\n"))
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in without
    )


class Recent:
    """The newest lines of a source, as many as fit a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self.lines: deque[Line] = deque()
        self.num_dropped = 0

    def add(self, line: Line) -> None:
        """Add a line, and drop the oldest ones that no longer fit."""
        self.lines.append(line)
        self._num_bytes += line.num_bytes
        while self._num_bytes > self._max_bytes and len(self.lines) > 1:
            self._num_bytes -= self.lines.popleft().num_bytes
            self.num_dropped += 1


def merged(sources: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """Yield the lines of all sources by time. Lines of one source keep their order."""
    return heapq.merge(*map(_monotonic, sources), key=lambda line: line.time)


def _monotonic(lines: Iterable[Line]) -> Sequence[Line]:
    """Return the lines of a source with times that never fall, after a clock was set back."""
    result: list[Line] = []
    for line in lines:
        last = result[-1].time if result else line.time
        result.append(line._replace(time=last) if line.time < last else line)
    return result


class Reordering:
    """Orders lines of several streams by time. Each line waits for older lines of other streams.

    A line waits for ``seconds``. If the waiting lines exceed ``max_bytes``, the oldest ones leave at once.
    """

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self._seconds, self._max_bytes, self._num_bytes = seconds, max_bytes, 0
        self._by_time: list[tuple[datetime, int, Line]] = []
        self._by_arrival: deque[tuple[float, int]] = deque()
        self._waiting: set[int] = set()
        self._number = 0

    def add(self, line: Line, now: float) -> None:
        """Add a line that arrived now, in seconds of any clock that never falls."""
        self._number += 1
        heapq.heappush(self._by_time, (line.time, self._number, line))
        self._by_arrival.append((now, self._number))
        self._waiting.add(self._number)
        self._num_bytes += line.num_bytes

    def due(self, now: float) -> Iterator[Line]:
        """Yield the lines that have waited long enough, and all older ones."""
        while self._num_bytes > self._max_bytes:
            yield self._pop()
        while self._by_arrival and self._by_arrival[0][0] + self._seconds <= now:
            _, number = self._by_arrival.popleft()
            while number in self._waiting:
                yield self._pop()

    def rest(self) -> Iterator[Line]:
        """Yield all lines that still wait."""
        while self._by_time:
            yield self._pop()

    def _pop(self) -> Line:
        _, number, line = heapq.heappop(self._by_time)
        self._waiting.discard(number)
        self._num_bytes -= line.num_bytes
        return line
