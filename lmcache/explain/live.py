"""The screen of ``top``: tables of the present work, sorted and scrolled by keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache.explain.causes import HITS
from lmcache.explain.findings import percent
from lmcache.explain.rates import LOWER_TIERS
from lmcache.explain.text import Style, bar, cut, duration, gigabytes, rate, table, width

_BAR_COLUMNS = 24
_STATE_COLUMNS = 60
_MIN_POD_LINES = 3
"""Lines for pods on a small terminal. The tables above them give way."""
_HELP = "q quit  p pause  s sort  ↑↓ PgUp PgDn scroll"

Pod = Mapping[str, Any]
Key = Callable[[Pod], Any]


class _Column(NamedTuple):
    """A column of the table of pods."""

    title: str
    name: str
    """Name for ``--sort``."""
    text: Callable[[Pod], str]
    sort: Key
    """Sort key; the smallest value comes first."""
    rank: int
    """On a narrow terminal, columns with the highest rank are left out first."""
    is_right: bool = True


def _tokens(pod: Pod, *groups: str) -> float | None:
    by_group = pod["tokensPerSecond"]
    return sum(by_group[group] for group in groups or by_group) if by_group is not None else None


def _bytes(pod: Pod, field: str) -> float | None:
    """Return the traffic of the lower tiers; None if it is unknown, or no lower tier exists."""
    lower = [tier for tier in pod["tiers"] if tier["name"] in LOWER_TIERS]
    known = [tier[field] for tier in lower if tier[field] is not None]
    return sum(known) if known else None


def _rate(number: float | None) -> str:
    return "-" if number is None else rate(number)


def _hit(pod: Pod) -> str:
    tokens = _tokens(pod)
    return percent(_tokens(pod, *HITS) or 0, tokens) if tokens else "-"


def _hit_key(pod: Pod) -> float:
    tokens = _tokens(pod)
    return -(_tokens(pod, *HITS) or 0) / tokens if tokens else 1.0


def _gigabytes(number: float | None) -> str:
    return "-" if number is None else gigabytes(number)


def _count(field: str) -> Callable[[Pod], str]:
    return lambda pod: f"{pod[field]:,}" if pod["uptimeSeconds"] else "-"


def _state(pod: Pod) -> str:
    if pod["problem"]:
        return str(pod["problem"])
    if open_tiers := [tier["name"] for tier in pod["tiers"] if tier["isCircuitOpen"]]:
        return f"{', '.join(open_tiers)} off"
    return "ok" if pod["tokensPerSecond"] is not None else "new"


def _natural(pod: Pod) -> tuple[str, str, int]:
    start, _, end = pod["name"].rpartition("-")
    return (pod["cluster"], start, int(end)) if end.isdecimal() else (pod["cluster"], pod["name"], -1)


def _group(title: str, group: str, rank: int) -> _Column:
    return _Column(
        title, group, lambda pod: _rate(_tokens(pod, group)), lambda pod: -(_tokens(pod, group) or 0), rank
    )


def _traffic(title: str, name: str, field: str, rank: int) -> _Column:
    return _Column(
        title, name, lambda pod: _gigabytes(_bytes(pod, field)), lambda pod: -(_bytes(pod, field) or 0), rank
    )


COLUMNS = (
    _Column("POD", "pod", lambda pod: pod["name"], _natural, 0, is_right=False),
    _Column("CLUSTER", "cluster", lambda pod: pod["cluster"], _natural, 6, is_right=False),
    _Column("UP", "up", lambda pod: duration(pod["uptimeSeconds"]) if pod["uptimeSeconds"] else "-",
        lambda pod: pod["uptimeSeconds"], 12),
    _Column("REQ/S", "requests", lambda pod: _rate(pod["requestsPerSecond"]),
        lambda pod: -(pod["requestsPerSecond"] or 0), 2),
    _Column("TOKENS/S", "tokens", lambda pod: _rate(_tokens(pod)), lambda pod: -(_tokens(pod) or 0), 3),
    _Column("HIT", "hit", _hit, _hit_key, 4),
    _group("ENGINE", "engine", 11),
    _group("MEMORY", "memory", 11),
    _group("DISK", "disk", 11),
    _group("PEERS", "peers", 11),
    _group("REMOTE", "remote", 11),
    _group("COMPUTED", "computed", 8),
    _traffic("LOAD B/S", "load", "loadBytesPerSecond", 5),
    _traffic("WRITE B/S", "write", "writeBytesPerSecond", 7),
    _Column("LOADS", "loads", _count("queuedLoads"), lambda pod: -pod["queuedLoads"], 9),
    _Column("WRITES", "writes", _count("queuedWrites"), lambda pod: -pod["queuedWrites"], 9),
    _Column("UNWRITTEN", "unwritten", _count("unwrittenRows"), lambda pod: -pod["unwrittenRows"], 10),
    _Column("STATE", "state", _state, lambda pod: (_state(pod) == "ok", _natural(pod)), 1, is_right=False),
)  # fmt: skip
SORTS = tuple(column.name for column in COLUMNS)
"""Names for ``--sort``: a column of the table of pods. Numbers are sorted with the largest first."""


def ordered(pods: Sequence[Pod], sort: str) -> list[Pod]:
    """Return the pods in the order of a column; pods that are equal there, by name."""
    column = COLUMNS[SORTS.index(sort)]
    return sorted(sorted(pods, key=_natural), key=column.sort)


def pod_table(
    pods: Sequence[Pod], style: Style, columns: int | None = None, *, sort: str = ""
) -> Sequence[str]:
    """Return the table of pods, with its title first.

    Args:
        pods: the pods, in the wanted order.
        style: colors.
        columns: columns of the terminal. The least important columns of the table are left out if it is
            wider. None: no limit.
        sort: the column that is marked as the order.
    """
    has_clusters = len({pod["cluster"] for pod in pods}) > 1
    shown = [column for column in COLUMNS if column.name != "cluster" or has_clusters]
    limit = None if columns is None else _STATE_COLUMNS  # a long problem must not displace the columns
    cells = {column: [column.text(pod)[:limit] for pod in pods] for column in shown}
    widths = {column: max(map(width, (column.title, *texts))) for column, texts in cells.items()}
    while columns is not None and len(shown) > 1 and sum(widths[c] + 2 for c in shown) - 2 > columns:
        highest = max(column.rank for column in shown)
        shown = [column for column in shown if column.rank < highest]
    titles = [column.title for column in shown]
    by_pod = zip(*(cells[column] for column in shown), strict=True)
    rows = [titles, *(_colored(list(row), style) for row in by_pod)]
    title, *lines = table(rows, right=[number for number, column in enumerate(shown) if column.is_right])
    marked = COLUMNS[SORTS.index(sort)].title if sort else ""
    before, found, after = title.partition(marked) if marked in titles else (title, "", "")
    head = style.title(before) + style.paint(found, "reverse") + style.title(after)
    return [cut(line, columns) if columns is not None else line for line in (head, *lines)]


def _colored(row: list[str], style: Style) -> list[str]:
    """Return the row with its state, the last cell, in a color."""
    state = row[-1]
    return [*row[:-1], style.paint(state, {"ok": "green", "new": "dim"}.get(state, "yellow"))]


def tables(figures: Mapping[str, Any], style: Style) -> Iterator[str]:
    """Yield the tables over all pods: tokens by group, and traffic by tier."""
    total = figures["total"]
    tokens = total["tokensPerSecond"]
    number = sum(tokens.values())
    rows = [("PROMPT TOKENS FROM", "PER SECOND", "SHARE", "")]
    for group, about in (*HITS.items(), ("computed", "computed")):
        share = tokens[group] / (number or 1)
        part = percent(tokens[group], number) if number else "-"
        rows.append((about, rate(tokens[group]), part, bar(share, _BAR_COLUMNS)))
    title, *lines = table(rows, right=(1, 2))
    yield style.title(title)
    yield from lines
    yield ""
    if not figures["tiers"]:
        return
    tier_rows = [("TIER", "LOAD B/S", "WRITE B/S", "QUEUED LOADS", "QUEUED WRITES", "CIRCUITS")]
    for tier in figures["tiers"]:
        is_lower = tier["name"] != "memory"
        queues = (f"{tier['queuedLoads']:,}", f"{tier['queuedWrites']:,}") if is_lower else ("-", "-")
        traffic = gigabytes(tier["loadBytesPerSecond"]), gigabytes(tier["writeBytesPerSecond"])
        tier_rows.append((tier["name"], *traffic, *queues, _circuits(tier, style) if is_lower else "-"))
    title, *lines = table(tier_rows, right=(1, 2, 3, 4))
    yield style.title(title)
    yield from lines
    yield ""


def _circuits(tier: Mapping[str, Any], style: Style) -> str:
    if not tier["openCircuits"]:
        return "closed"
    about = f"open in {tier['openCircuits']} of {tier['pods']} pods: {tier['problem']}"
    return style.paint(about[:_STATE_COLUMNS], "red")


def summary(figures: Mapping[str, Any]) -> str:
    """Return one line about all pods."""
    total, num_pods = figures["total"], len(figures["pods"])
    number = sum(total["tokensPerSecond"].values())
    return (
        f"{total['pods']} of {num_pods} pods counted, {rate(total['requestsPerSecond'])} requests/s, "
        f"{rate(number)} prompt tokens/s"
    )


def page(figures: Mapping[str, Any], style: Style, *, sort: str) -> Iterator[str]:
    """Yield all lines, for a terminal that is not used as a screen, or for a file."""
    yield summary(figures)
    yield ""
    yield from tables(figures, style)
    yield from pod_table(ordered(figures["pods"], sort), style) if figures["pods"] else ["There are no pods."]
    if figures["problems"]:
        yield ""
        yield from figures["problems"]


class Live:
    """The state of the screen: figures, order, position and pause."""

    def __init__(self, title: str, style: Style, sort: str, seconds: float) -> None:
        """``seconds``: interval between two readings."""
        self._title, self._style, self._seconds = title, style, seconds
        self._sort, self._first, self._page_lines = sort, 0, 1
        self.is_paused = False
        self.figures: Mapping[str, Any] | None = None
        """Figures on the screen; None before the first answer."""
        self.age: Callable[[], float] = lambda: 0.0
        """Returns the seconds since these figures were read."""

    def press(self, key: str) -> bool:
        """Handle a key. Returns False for "q"."""
        steps = {"up": -1, "down": 1, "page up": -self._page_lines, "page down": self._page_lines}
        if key == "p":
            self.is_paused = not self.is_paused
        elif key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        elif key == "home":
            self._first = 0
        elif key == "end":
            self._first = len(self.figures["pods"]) if self.figures else 0
        else:
            self._first += steps.get(key, 0)
        return key != "q"

    def draw(self, columns: int, lines: int) -> Sequence[str]:
        """Return the lines of the screen."""
        if self.figures is None:
            return [cut(line, columns) for line in self._head("reading …", columns)][:lines]
        head = [*self._head(summary(self.figures), columns), *self._problems(), ""]
        above = [*head, *tables(self.figures, self._style)]
        if lines - len(above) - 2 < _MIN_POD_LINES:
            above = head
        num_rows = max(1, lines - len(above) - 2)  # the titles of the table, and the help
        pods = ordered(self.figures["pods"], self._sort)
        self._page_lines = num_rows
        self._first = max(0, min(self._first, len(pods) - num_rows))
        shown = pods[self._first : self._first + num_rows]
        below = list(pod_table(shown, self._style, columns, sort=self._sort)) if shown else [""]
        body = [cut(line, columns) for line in above] + below
        body = body[: lines - 1]
        return [*body, *[""] * (lines - 1 - len(body)), cut(self._foot(len(shown), len(pods)), columns)]

    def _head(self, about: str, columns: int) -> Sequence[str]:
        state = self._style.paint("paused", "yellow") if self.is_paused else f"every {self._seconds:g} s"
        age = self.age()
        late = f", {duration(age)} old" if age > 2 * self._seconds + 1 else ""
        return [f"{self._style.title(self._title)}  {state}{late}  {about}"]

    def _problems(self) -> Sequence[str]:
        problems = self.figures["problems"] if self.figures else ()
        return [self._style.paint(problem, "yellow") for problem in problems[:2]]

    def _foot(self, num_shown: int, num_pods: int) -> str:
        place = f"pods {self._first + 1}-{self._first + num_shown} of {num_pods}" if num_shown else "no pods"
        return self._style.paint(f"{_HELP}  sorted by {self._sort}  {place}", "dim")
