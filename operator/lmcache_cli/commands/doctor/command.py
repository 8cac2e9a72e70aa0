"""The command line of ``kubectl lmcache doctor``, and its output for people and programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.facts import Facts
from lmcache_cli.commands.doctor.reading import read_facts
from lmcache_cli.commands.doctor.results import Level, Result, summary
from lmcache_operator import DOCS
from lmcache_operator.contract.conditions import runbook
from lmcache_store.top import seconds

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


_WORDS = {
    Level.FAILURE: ("FAILURE", "red"),
    Level.WARNING: ("WARNING", "yellow"),
    Level.UNKNOWN: ("UNKNOWN", "dim"),
    Level.OK: ("ok", "green"),
}
_WORD_COLUMNS = max(len(word) for word, _ in _WORDS.values()) + 1
_PLURALS = {"failure": "failures", "warning": "warnings"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    printing.describe(parser, _ABOUT, _EPILOG, "-n team", "-n team qwen3-8b --strict")
    connection.add_connection(parser, default="all")
    printing.add_output(parser)
    about = "namespace of the operator (default: all namespaces, or else lmcache-system)"
    parser.add_argument(
        "--operator-namespace", type=connection.namespace_name, metavar="NAME", default="", help=about
    )
    about = "time for the whole answer; a slow API server needs more (default: %(default)g)"
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", default=5.0, help=about)
    parser.add_argument("--strict", action="store_true", help="count warnings as failures")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def check(connected: connection.ApiConnection) -> int:
        facts = await read_facts(
            connected, arguments.name, arguments.operator_namespace, seconds=arguments.timeout
        )
        results = run_checks(facts)
        style = printing.Style(printing.is_colorful(sys.stdout))
        shown = lines(facts, results, style, printing.terminal_width())
        print(printing.answer(arguments.output, shown, document(facts, results)), end="", flush=True)
        return exit_status(facts, results, is_strict=arguments.strict)

    return connection.run(arguments, check)


def exit_status(facts: Facts, results: list[Result], *, is_strict: bool) -> int:
    """Return the exit status of the command."""
    if not facts.listed_clusters.is_known:
        return connection.EXIT_ERROR
    levels = {result.level for result in results}
    has_problem = Level.FAILURE in levels or (is_strict and Level.WARNING in levels)
    return connection.EXIT_FOUND if has_problem else 0


def document(facts: Facts, results: Sequence[Result]) -> dict[str, Any]:
    """Return the results as plain data. Its fields are stable: programs may read them."""
    return {
        "version": 1,
        "namespace": facts.namespace,
        "time": datetime.fromtimestamp(facts.now, UTC).isoformat(timespec="seconds"),
        "summary": dict(summary(results)),
        "checks": [result.document() for result in results],
    }


def lines(facts: Facts, results: Sequence[Result], style: printing.Style, columns: int) -> Iterator[str]:
    """Yield the lines for people. Results come in the order of the argument."""
    for result in results:
        yield from _result_lines(result, style, columns)
    numbers = summary(results)
    counts = [
        f"{number} {_PLURALS.get(level, level) if number > 1 else level}"
        for level, number in numbers.items()
        if number
    ]
    yield ""
    checks = f"{len(results)} check{'s' if len(results) > 1 else ''}"
    yield style.title(f"{checks} in namespace {facts.namespace}: {', '.join(counts)}.")


def _result_lines(result: Result, style: printing.Style, columns: int) -> Iterator[str]:
    word, color = _WORDS[result.level]
    first, *rest = printing.wrapped(
        f"{result.subject} {result.check}: {result.statement}", columns - _WORD_COLUMNS, "", indent=0
    )
    yield f"{style.paint(word, color)}{' ' * (_WORD_COLUMNS - len(word))}{first}"
    indent = " " * _WORD_COLUMNS
    yield from (f"{indent}{line}" for line in rest)
    # Commands and addresses are not wrapped, because users paste them.
    remedy = printing.wrapped(result.remedy, columns - len(indent) - len("-> "), "", indent=0)
    remedy += result.command.splitlines()
    if result.runbook:
        remedy.append(f"{DOCS}/runbooks/{runbook(result.runbook)}")
    yield from (f"{indent}{'  ' if number else '->'} {line}" for number, line in enumerate(remedy))
