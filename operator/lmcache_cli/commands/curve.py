"""``kubectl lmcache curve``: the hit ratio and value of each size of a tier."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_cli.commands import connection, printing
from lmcache_operator.api import KIND
from lmcache_operator.api.parse import parse
from lmcache_operator.api.tiers import ManagedRemote
from lmcache_operator.errors import NoCurveError
from lmcache_operator.manifests import file_errors, read_objects
from lmcache_operator.specs import Object
from lmcache_store.common.units import format_size, parse_size

_TIERS = ("memory", "remote")
_ABOUT = {"samples": "samples", "half-life": "window", "observed": "observedAt"}
_MARKS = {"present": "current", "recommended": "recommended"}
_MIN_BARS, _MAX_BARS = 10, 60
_OTHER_COLUMNS = 59
"""Columns of a line besides the bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    about = "Show the hit ratio and value of each size of a cluster's cache tier."
    status = "exit status: 0; 2 if there is no curve, or the cluster cannot be read"
    printing.describe(parser, about, status, "-n team qwen3-8b --tier memory")
    connection.add_connection(parser)
    about = "read the LMCacheCluster from a YAML or JSON file instead of the API server; - for standard input"
    parser.add_argument("-f", "--filename", type=Path, metavar="FILE", help=about)
    parser.add_argument("--tier", choices=_TIERS, default=_TIERS[0], help="default: %(default)s")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.filename:
        return connection.reported(lambda: _show(arguments, _from_file(arguments)))

    async def show(connected: connection.ApiConnection) -> int:
        return _show(arguments, await connected.cluster(arguments.name))

    return connection.run(arguments, show)


def _show(arguments: argparse.Namespace, resource: Object) -> int:
    print(curve_text(resource, arguments.tier, shutil.get_terminal_size().columns), end="")
    return 0


def _from_file(arguments: argparse.Namespace) -> Object:
    """The first LMCacheCluster, or the first of this name, also in a List of ``kubectl get -o yaml``."""
    name = arguments.name
    with file_errors(arguments.filename):
        documents = [each for each in read_objects(arguments.filename) if isinstance(each, dict)]
        for item in chain.from_iterable((each, *(each.get("items") or ())) for each in documents):
            if item.get("kind") == KIND and name in (None, item["metadata"]["name"]):
                return dict(item)
        raise ValueError(f"contains no {KIND}{f' {name}' if name else ''}")


class CurveRow(NamedTuple):
    """One size on the curve."""

    num_bytes: int
    size: str
    hit: float
    """Hits in per cent of the looked-up prompt tokens. ``low`` and ``high`` are its 95 % bounds."""
    low: float
    high: float
    net: float
    """Net value in USD per hour, compared with the present size."""


def curve_text(resource: Object, tier: str, width: int) -> str:
    """Return the curve of a tier in the status of an LMCacheCluster. ``width``: columns of the terminal.

    Raises:
        InvalidSpecError: the spec is invalid.
        NoCurveError: there is no curve. The message gives the reason.
    """
    metadata, name = resource["metadata"], resource["metadata"]["name"]
    scaling = (resource.get("status") or {}).get("autoscaling")
    if not scaling:
        raise NoCurveError(
            f"{name}: status.autoscaling is empty. The operator fills it some minutes after a sidecar "
            "answers, unless spec.autoscaling.mode is Off"
        )
    try:
        if not (status := scaling.get(tier)):
            known = ", ".join(f"--tier {tier}" for tier in _TIERS if scaling.get(tier)) or "none yet"
            raise NoCurveError(f"{name}: its {tier} tier has no curve; available: {known}")
        if not status.get("curve"):
            raise NoCurveError(f"{name}: its {tier} tier has no curve yet: {status.get('reason')}")
        managed = parse(resource).spec.tiers.managed if tier == _TIERS[1] else None
        sizes = {word: _size(status[field], managed) for word, field in _MARKS.items()}
        about = ", ".join(f"{label} {scaling[field]}" for label, field in _ABOUT.items() if field in scaling)
        title = f"{metadata.get('namespace') or 'default'}/{name}: the {tier} tier"
        lines = _lines(sorted(map(_point, status["curve"])), sizes, width)
        sentences = textwrap.wrap(str(status["reason"]), width)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoCurveError(
            f"{name}: status.autoscaling is from another version: {type(error).__name__}: {error}"
        ) from error
    return "\n".join([title, f"({about})", "", *lines, "", *sentences]) + "\n"


def _lines(points: Sequence[CurveRow], sizes: Mapping[str, int], width: int) -> list[str]:
    """Return a line for each point. ``sizes``: those to mark, by the word that marks them."""
    largest = max(point.high for point in points) or 1.0
    scale = max(_MIN_BARS, min(_MAX_BARS, width - _OTHER_COLUMNS)) / largest
    rows = [("", "size", "hits", "(sampling)", "", "USD/h", "")]
    for point in points:
        words = " and ".join(word for word, size in sizes.items() if size == point.num_bytes)
        mark, bounds = ">" if "present" in words else "", f"{point.low:.1f}-{point.high:.1f}"
        bar = ("=" * round(scale * point.low)).ljust(round(scale * point.high), "-")
        rows.append((mark, point.size, f"{point.hit:.1f} %", bounds, bar, f"{point.net:+.3f}", words))
    return printing.table(rows, right=(1, 2, 5))


def _size(value: Any, managed: ManagedRemote | None) -> int:
    """Return a size of the status in bytes. For shards, ``value`` is their number."""
    return parse_size(format_size(value * managed.shard_bytes) if managed else value)


def _point(values: Mapping[str, Any]) -> CurveRow:
    size, hit = str(values["size"]), float(values["hit"])
    low, high = (float(values.get(name, hit)) for name in ("low", "high"))
    return CurveRow(parse_size(size), size, 100 * hit, 100 * low, 100 * high, float(values["netPerHour"]))
