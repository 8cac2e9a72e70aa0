"""Refuse tests that depend on the speed of the machine: a process may get no processor for seconds.

A test waits for a condition with the usual limit of a minute, or uses a clock of its own. Sleeps, limits
below a minute and assertions about a clock depend on real time. A line that needs one has a comment
``# real time: REASON``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.sources import ROOT, python_files

MIN_LIMIT_SECONDS = 60
MARK = "# real time: "
CLOCKS = {"time.monotonic", "time.time", "time.perf_counter", "monotonic", "perf_counter"}
SLEEPS = {"time.sleep", "sleep"}
VIRTUAL_LOOP = "jumping_loop"
"""Modules that name this loop may sleep in asyncio: time passes at once."""


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and problem of each dependence on real time that has no reason."""
    lines = text.splitlines()
    sleeps = SLEEPS if VIRTUAL_LOOP in text else SLEEPS | {"asyncio.sleep"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call | ast.Assert) and (problem := _problem(node, sleeps)):
            first, last = max(0, node.lineno - 2), node.end_lineno or node.lineno
            if not any(MARK in line for line in lines[first:last]):
                yield node.lineno, problem


def all_problems() -> list[str]:
    """Problems of all tests."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {problem}"
        for path in python_files(("tests",))
        if not _is_script(path)
        for number, problem in problems(path.read_text())
    ]


def _is_script(path: Path) -> bool:
    """Fuzz targets and tests of releases and of a GPU run on request."""
    return path.relative_to(ROOT).parts[1] in ("fuzz", "gpu", "release")


def _problem(node: ast.Call | ast.Assert, sleeps: set[str]) -> str:
    if isinstance(node, ast.Assert):
        calls = (part for part in ast.walk(node.test) if isinstance(part, ast.Call))
        is_timed = any(ast.unparse(call.func) in CLOCKS for call in calls)
        return "asserts a duration: assert an order of events, or use a clock of the test" if is_timed else ""
    name = ast.unparse(node.func)
    if name in sleeps and not (node.args and _seconds(node.args[0]) == 0):
        return f"{name}: wait for a condition"
    for keyword in node.keywords:
        seconds = _seconds(keyword.value) if keyword.arg == "timeout" else None
        if seconds is not None and 0 < seconds < MIN_LIMIT_SECONDS:
            return f"timeout={seconds:g}: use {MIN_LIMIT_SECONDS} s or more, or no limit"
    return ""


def _seconds(node: ast.expr) -> float | None:
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return float(node.value) if is_number else None  # type: ignore[attr-defined]
