"""The command line of ``kubectl lmcache doctor``."""

from __future__ import annotations

import argparse
import sys

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.doctor import view
from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.facts import Facts
from lmcache_cli.commands.doctor.reading import read_facts
from lmcache_cli.commands.doctor.results import Level, Result

_ABOUT = """\
Check an installation of LMCache Cluster, and say how to repair it: versions, rights, limits of the
namespace, engines, sidecars and Redis. It changes nothing.

With NAME, the command checks one LMCacheCluster. Without NAME, it checks all of the namespace.
"""
_EPILOG = """\
exit status:
  0  no failure
  1  at least one failure; with --strict also a warning
  2  the LMCacheClusters cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    printing.describe(parser, _ABOUT, _EPILOG)
    connection.add_connection(parser, default="all")
    printing.add_output(parser)
    about = "namespace of the operator (default: all namespaces, or else lmcache-system)"
    parser.add_argument(
        "--operator-namespace", type=connection.namespace_name, metavar="NAME", default="", help=about
    )
    parser.add_argument("--strict", action="store_true", help="count warnings as failures")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def check(connected: connection.ApiConnection) -> int:
        facts = await read_facts(connected, arguments.name, arguments.operator_namespace)
        results = run_checks(facts)
        print(_text(arguments, facts, results), end="", flush=True)
        return exit_status(facts, results, is_strict=arguments.strict)

    return connection.run(arguments, check)


def exit_status(facts: Facts, results: list[Result], *, is_strict: bool) -> int:
    """Return the exit status of the command."""
    if not facts.listed_clusters.is_known:
        return connection.EXIT_ERROR
    levels = {result.level for result in results}
    has_problem = Level.FAILURE in levels or (is_strict and Level.WARNING in levels)
    return connection.EXIT_FOUND if has_problem else 0


def _text(arguments: argparse.Namespace, facts: Facts, results: list[Result]) -> str:
    if arguments.output != "table":
        return printing.document(view.document(facts, results), arguments.output)
    style = printing.Style(printing.is_colorful(sys.stdout))
    return "\n".join(view.lines(facts, results, style, printing.terminal_width())) + "\n"
