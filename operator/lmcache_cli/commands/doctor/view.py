"""Prints results: lines for people, and plain data for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lmcache_cli.commands import printing
from lmcache_cli.commands.doctor.facts import Facts
from lmcache_cli.commands.doctor.results import Level, Result, summary
from lmcache_operator.contract.conditions import runbook

_WORDS = {
    Level.FAILURE: ("FAILURE", "red"),
    Level.WARNING: ("WARNING", "yellow"),
    Level.UNKNOWN: ("UNKNOWN", "dim"),
    Level.OK: ("ok", "green"),
}
_WORD_COLUMNS = max(len(word) for word, _ in _WORDS.values()) + 1
_PLURALS = {"failure": "failures", "warning": "warnings"}
_RUNBOOKS = "docs/runbooks"


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
    remedy = result.remedy
    if result.runbook:
        remedy = f"{remedy} Runbook: {_RUNBOOKS}/{runbook(result.runbook)}".strip()
    if remedy:
        begin = f"{indent}-> "
        yield from printing.wrapped(remedy, columns, begin, indent=len(begin))
