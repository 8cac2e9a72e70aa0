"""``kubectl lmcache curve``: the hit ratio and value of each size of a tier."""

from __future__ import annotations

import argparse
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

from lmcache_cli.commands import connection, printing
from lmcache_cli.curves import TIERS, Curve
from lmcache_operator.api import KIND
from lmcache_operator.manifests import file_errors, read_objects
from lmcache_operator.specs import Object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    about = "Show the hit ratio and value of each size of a cluster's cache tier."
    printing.describe(parser, about, "exit status: 0; 2 if there is no curve, or the cluster cannot be read")
    connection.add_connection(parser)
    about = "read the LMCacheCluster from a YAML or JSON file instead of the API server; - for standard input"
    parser.add_argument("-f", "--filename", type=Path, metavar="FILE", help=about)
    parser.add_argument("--tier", choices=TIERS, default=TIERS[0], help="default: %(default)s")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.filename:
        return connection.reported(lambda: _show(arguments, _from_file(arguments)))

    async def show(connected: connection.ApiConnection) -> int:
        return _show(arguments, await connected.cluster(arguments.name))

    return connection.run(arguments, show)


def _show(arguments: argparse.Namespace, resource: Object) -> int:
    curve = Curve.of(resource, arguments.tier)
    print(curve.text(shutil.get_terminal_size().columns), end="")
    return 0


def _from_file(arguments: argparse.Namespace) -> Object:
    with file_errors(arguments.filename):
        return _named(read_objects(arguments.filename), arguments.name)


def _named(objects: list[Any], name: str | None) -> Object:
    """The first LMCacheCluster, or the first of this name, also in a List of ``kubectl get -o yaml``."""
    documents = [document for document in objects if isinstance(document, dict)]
    for item in chain.from_iterable((each, *(each.get("items") or ())) for each in documents):
        if item.get("kind") == KIND and name in (None, item["metadata"]["name"]):
            return dict(item)
    raise ValueError(f"contains no {KIND}{f' {name}' if name else ''}")
