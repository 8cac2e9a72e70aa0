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

    check: str
    """Name of the check in camel case, which programs may rely on."""
    level: Level
    statement: str
    """The state, as a sentence."""
    remedy: str = ""
    """Repair, as a sentence; empty: nothing is to be done."""
    runbook: str = ""
    """Reason or alert with a runbook; empty: none fits."""
    missing_right: str = ""
    """Right that the user lacks for this check, such as "get namespaces"; empty: none."""
    subject: str = ""
    """Object that was checked: "installation", a namespace, or namespace/cluster."""

    def document(self) -> dict[str, Any]:
        """Return the result as plain data with stable field names."""
        fields = self._asdict()
        page = runbook(self.runbook) if self.runbook else ""
        return fields | {
            "level": self.level.value,
            "runbook": page,
            "missingRight": fields.pop("missing_right"),
        }


def ok(check: str, statement: str) -> Result:
    """Return the result of a check that found no problem."""
    return Result(check, Level.OK, statement)


def warning(check: str, statement: str, remedy: str, runbook: str = "") -> Result:
    """Return a problem that costs speed or hits, or that may become a failure."""
    return Result(check, Level.WARNING, statement, remedy, runbook)


def failure(check: str, statement: str, remedy: str, runbook: str = "") -> Result:
    """Return a problem because of which a part does not work."""
    return Result(check, Level.FAILURE, statement, remedy, runbook)


def unknown(check: str, answer: ApiAnswer) -> Result:
    """Return the result of a check whose facts could not be read."""
    if answer.missing_right:
        remedy = "Ask an administrator for this right."
        statement = f'Not checked: your user lacks the right "{answer.missing_right}".'
        return Result(check, Level.UNKNOWN, statement, remedy, missing_right=answer.missing_right)
    return Result(check, Level.UNKNOWN, f"Not checked: {answer.problem}", "Run the command again.")


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of further ones: "engine-0, and 997 more"."""
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")


def of_pods(result: Result, pods: Sequence[str], total: int) -> Result:
    """Return a result about some pods. Its statement is about one pod."""
    count = f"{len(pods)} of {total} pods" if total > 1 else "1 pod"
    return result._replace(statement=f"{result.statement} This concerns {count}: {first_of(pods)}.")


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
