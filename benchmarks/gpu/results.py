"""Results of a step of ``make gpu-check``: lines of JSON in a file, each written as soon as it is known.

A step may be killed at its time limit. What it has written until then is on the page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.shared_files import prefix


class Results:
    """Results that one step writes to ``FOLDER/STEP.jsonl``."""

    def __init__(self, folder: Path, step: str, seconds: float = 3600.0) -> None:
        """``seconds``: time limit of the step."""
        self.folder = folder / "logs"
        """Folder for output of child processes."""
        self.shared_prefix = prefix(folder)
        """Begin of the names of this step's files in /dev/shm. They are removed if the step is killed."""
        self.num_problems = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{step}.jsonl"
        self._began_at = time.monotonic()
        self._seconds = seconds

    def section(self, title: str, headings: Sequence[str], text: str) -> Section:
        """Begin a table of the page. ``text`` describes the measurement."""
        self._write(section=title, headings=list(headings), text=text)
        return Section(self, title)

    def note(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self._began_at:5.1f} s] {text}", flush=True)

    def problem(self, what: str, meaning: str) -> None:
        """Record a failure, and its meaning for the user. The step continues, and ends with status 1."""
        self.num_problems += 1
        self._write(problem=what, meaning=meaning)

    def seconds_left(self) -> float:
        """Seconds until the step is killed."""
        return self._began_at + self._seconds - time.monotonic()

    def _write(self, **entry: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        shown = entry.get("section") or entry.get("problem") or " | ".join(entry["row"])
        self.note(f"problem: {shown}" if "problem" in entry else shown)


class Section:
    """A table of the page. ``Results.section`` creates it."""

    def __init__(self, results: Results, title: str) -> None:
        self._results, self._title = results, title

    def add(self, *cells: str) -> None:
        """Write a row."""
        self._results._write(of=self._title, row=cells)


@dataclass(frozen=True)
class Problem:
    """A failure, and its meaning for the user."""

    what: str
    meaning: str


def problems(entries: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Return the problems among the entries of a step."""
    return [Problem(entry["problem"], entry["meaning"]) for entry in entries if "problem" in entry]


def markdown(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the tables among the entries of a step, as sections of the page."""
    tables: dict[str, list[str]] = {}
    for entry in entries:
        if "section" in entry:
            head = f"### {entry['section']}\n{entry['text']}\n\n{_row(entry['headings'])}\n"
            tables[entry["section"]] = [head + _row(["---"] * len(entry["headings"]))]
        elif "row" in entry:
            tables[entry["of"]].append(_row(entry["row"]))
    return "\n\n".join("\n".join(lines) for lines in tables.values())


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def read(folder: Path, step: str) -> list[dict[str, Any]]:
    """Return what a step has written. A killed step may leave half a line at the end, which is left out."""
    path = folder / f"{step}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def held(value: float, bar: float, *, is_least: bool = False) -> str:
    """Return a bar, and whether a value holds it."""
    sign, holds = ("≥", value >= bar) if is_least else ("≤", value <= bar)
    return f"{sign} {bar:g}, {'held' if holds else '**not held**'}"
