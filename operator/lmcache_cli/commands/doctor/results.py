"""Results of checks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_operator.contract.conditions import runbook


class Level(StrEnum):
    """Outcome of a check, the worst first."""

    FAILURE = "failure"
    WARNING = "warning"
    UNKNOWN = "unknown"
    OK = "ok"


class Result(NamedTuple):
    """The outcome of one check."""

    level: Level
    statement: str
    """The state, as a sentence."""
    remedy: str = ""
    """Repair, as a sentence; empty: nothing is to be done, or only to run the command."""
    runbook: str = ""
    """Reason or alert with a runbook; empty: none fits."""
    missing_right: str = ""
    """Right that the user lacks for this check, such as "get namespaces"; empty: none."""
    check: str = ""
    """Name of the check in camel case; empty until ``run_checks`` sets it."""
    subject: str = ""
    """Object that was checked: "installation", a namespace, or namespace/cluster."""
    command: str = ""
    """Command lines of the repair, which the user can paste; empty: there are none."""

    def document(self) -> dict[str, Any]:
        """Return the result as plain data with stable field names."""
        page = runbook(self.runbook) if self.runbook else ""
        fields = {"check": self.check, **self._asdict(), "level": self.level.value, "runbook": page}
        return fields | {"missingRight": fields.pop("missing_right")}


def ok(statement: str) -> Result:
    """Return the result of a check that found no problem."""
    return Result(Level.OK, statement)


def warning(statement: str, remedy: str, runbook: str = "", command: str = "") -> Result:
    """Return a problem that costs speed or hits, or that may become a failure."""
    return Result(Level.WARNING, statement, remedy, runbook, command=command)


def failure(statement: str, remedy: str, runbook: str = "", command: str = "") -> Result:
    """Return a problem because of which a part does not work."""
    return Result(Level.FAILURE, statement, remedy, runbook, command=command)


def unknown(answer: ApiAnswer) -> Result:
    """Return the result of a check whose facts could not be read."""
    if answer.missing_right:
        remedy = "Ask an administrator for this right."
        statement = f'Not checked: your user lacks the right "{answer.missing_right}".'
        return Result(Level.UNKNOWN, statement, remedy, missing_right=answer.missing_right)
    return Result(Level.UNKNOWN, f"Not checked: {answer.problem}", "Run the command again.")


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of further ones: "engine-0, and 997 more"."""
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def of_pods(result: Result, pods: Sequence[str], total: int) -> Result:
    """Return a result about some pods. Its statement is about one pod, which its command calls POD."""
    count = f"{len(pods)} of {total} pods" if total > 1 else "1 pod"
    statement = f"{result.statement} This concerns {count}: {first_of(pods)}."
    return result._replace(statement=statement, command=result.command.replace(" POD", f" {pods[0]}"))


def grouped(
    results: Iterable[tuple[str, Result]], total: int, good: Result | None = None
) -> Iterator[Result]:
    """Yield each different result once, with the pods that it concerns. ``results`` has pods and results.

    ``good`` is the result of a check of some pods (``total``) that found no problem.
    """
    pods: dict[Result, list[str]] = {}
    for pod, result in results:
        pods.setdefault(result, []).append(pod)
    for result, concerned in pods.items():
        yield of_pods(result, concerned, total)
    if good and total and not pods:
        yield good


def summary(results: Iterable[Result]) -> Mapping[str, int]:
    """Return the number of results by level."""
    numbers = Counter(result.level for result in results)
    return {level.value: numbers[level] for level in Level}
