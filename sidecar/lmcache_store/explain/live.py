"""The tables of ``top``: the present work of sidecars. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_store.causes import HITS, LOWER_TIERS
from lmcache_store.common.text import Style, bar, gigabytes, rate, table
from lmcache_store.common.units import format_seconds
from lmcache_store.explain.findings import percent

_BAR_COLUMNS = 24
_STATE_COLUMNS = 60

PodRow = Mapping[str, Any]
SortKey = Callable[[PodRow], Any]


class _Column(NamedTuple):
    """A column of the table of pods."""

    title: str
    name: str
    """Name for ``--sort``."""
    text: Callable[[PodRow], str]
    sort: SortKey
    """Sort key; the smallest value comes first."""
    is_right: bool = True


def _tokens(pod: PodRow, *groups: str) -> float | None:
    by_group = pod["tokensPerSecond"]
    return sum(by_group[group] for group in groups or by_group) if by_group is not None else None


def _bytes(pod: PodRow, field: str) -> float | None:
    """Return the traffic of the lower tiers; None if it is unknown, or no lower tier exists."""
    lower = [tier for tier in pod["tiers"] if tier["name"] in LOWER_TIERS]
    known = [tier[field] for tier in lower if tier[field] is not None]
    return sum(known) if known else None


def _rate(number: float | None) -> str:
    return "-" if number is None else rate(number)


def _hit(pod: PodRow) -> str:
    tokens = _tokens(pod)
    return percent(_tokens(pod, *HITS) or 0, tokens) if tokens else "-"


def _hit_key(pod: PodRow) -> float:
    tokens = _tokens(pod)
    return -(_tokens(pod, *HITS) or 0) / tokens if tokens else 1.0


def _gigabytes(number: float | None) -> str:
    return "-" if number is None else gigabytes(number)


def _count(field: str) -> Callable[[PodRow], str]:
    return lambda pod: f"{pod[field]:,}" if pod["uptimeSeconds"] else "-"


def _state(pod: PodRow) -> str:
    if pod["problem"]:
        return str(pod["problem"])
    if open_tiers := [tier["name"] for tier in pod["tiers"] if tier["isCircuitOpen"]]:
        return f"{', '.join(open_tiers)} off"
    return "ok" if pod["tokensPerSecond"] is not None else "new"


def _natural(pod: PodRow) -> tuple[str, str, int]:
    start, _, end = pod["name"].rpartition("-")
    return (pod["cluster"], start, int(end)) if end.isdecimal() else (pod["cluster"], pod["name"], -1)


def _group(title: str, group: str) -> _Column:
    return _Column(
        title, group, lambda pod: _rate(_tokens(pod, group)), lambda pod: -(_tokens(pod, group) or 0)
    )


def _traffic(title: str, name: str, field: str) -> _Column:
    return _Column(
        title, name, lambda pod: _gigabytes(_bytes(pod, field)), lambda pod: -(_bytes(pod, field) or 0)
    )


COLUMNS = (
    _Column("POD", "pod", lambda pod: pod["name"], _natural, is_right=False),
    _Column("CLUSTER", "cluster", lambda pod: pod["cluster"], _natural, is_right=False),
    _Column("UP", "up", lambda pod: format_seconds(pod["uptimeSeconds"]) if pod["uptimeSeconds"] else "-",
        lambda pod: pod["uptimeSeconds"]),
    _Column("REQ/S", "requests", lambda pod: _rate(pod["requestsPerSecond"]),
        lambda pod: -(pod["requestsPerSecond"] or 0)),
    _Column("TOKENS/S", "tokens", lambda pod: _rate(_tokens(pod)), lambda pod: -(_tokens(pod) or 0)),
    _Column("HIT", "hit", _hit, _hit_key),
    _group("ENGINE", "engine"),
    _group("MEMORY", "memory"),
    _group("DISK", "disk"),
    _group("PEERS", "peers"),
    _group("REMOTE", "remote"),
    _group("COMPUTED", "computed"),
    _traffic("LOAD B/S", "load", "loadBytesPerSecond"),
    _traffic("WRITE B/S", "write", "writeBytesPerSecond"),
    _Column("LOADS", "loads", _count("queuedLoads"), lambda pod: -pod["queuedLoads"]),
    _Column("WRITES", "writes", _count("queuedWrites"), lambda pod: -pod["queuedWrites"]),
    _Column("UNWRITTEN", "unwritten", _count("unwrittenRows"), lambda pod: -pod["unwrittenRows"]),
    _Column("STATE", "state", _state, lambda pod: (_state(pod) == "ok", _natural(pod)), is_right=False),
)  # fmt: skip
SORTS = tuple(column.name for column in COLUMNS)
"""Names for ``--sort``: a column of the table of pods. Numbers are sorted with the largest first."""


def ordered(pods: Sequence[PodRow], sort: str) -> list[PodRow]:
    """Return the pods in the order of a column; pods that are equal there, by name."""
    column = COLUMNS[SORTS.index(sort)]
    return sorted(sorted(pods, key=_natural), key=column.sort)


def pod_table(pods: Sequence[PodRow], style: Style) -> Sequence[str]:
    """Return the table of pods, with its title first. ``pods``: at least one, in the wanted order."""
    has_clusters = len({pod["cluster"] for pod in pods}) > 1
    shown = [column for column in COLUMNS if column.name != "cluster" or has_clusters]
    rows = [_colored([column.text(pod) for column in shown], style) for pod in pods]
    right = [number for number, column in enumerate(shown) if column.is_right]
    return style.titled(table([[column.title for column in shown], *rows], right=right))


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
    yield from style.titled(table(rows, right=(1, 2)))
    yield ""
    if not figures["tiers"]:
        return
    tier_rows = [("TIER", "LOAD B/S", "WRITE B/S", "QUEUED LOADS", "QUEUED WRITES", "CIRCUITS")]
    for tier in figures["tiers"]:
        is_lower = tier["name"] != "memory"
        queues = (f"{tier['queuedLoads']:,}", f"{tier['queuedWrites']:,}") if is_lower else ("-", "-")
        traffic = gigabytes(tier["loadBytesPerSecond"]), gigabytes(tier["writeBytesPerSecond"])
        tier_rows.append((tier["name"], *traffic, *queues, _circuits(tier, style) if is_lower else "-"))
    yield from style.titled(table(tier_rows, right=(1, 2, 3, 4)))
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
    """Yield all lines."""
    yield summary(figures)
    yield ""
    yield from tables(figures, style)
    yield from pod_table(ordered(figures["pods"], sort), style) if figures["pods"] else ["There are no pods."]
    if figures["problems"]:
        yield ""
        yield from figures["problems"]
