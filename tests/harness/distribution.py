"""A pytest plugin that assigns test files to the workers of pytest-xdist.

Each file runs on one worker. All files that use a control plane run on the same worker, and first: a second
control plane would cost a minute of processor time. These tests mostly wait for Kubernetes, so the other
workers can use the processor.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CONTROL_PLANE = "control plane"


@cache
def unit_of(file: str) -> str:
    """Return the unit of work that the tests of ``file``, a path in the repository, belong to."""
    path = ROOT / file
    return _CONTROL_PLANE if path.is_file() and "pytest.mark.kube" in path.read_text() else file


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse sets of parameters: their order differs between workers, and pytest-xdist then runs no test."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names, values = mark.args[:2] if len(mark.args) > 1 else ("", mark.kwargs.get("argvalues"))
        if isinstance(values, (set, frozenset)):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: sort the set of parameters {names!r}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that use a control plane to the front."""
    items.sort(key=lambda item: unit_of(_file_of(item.nodeid)) != _CONTROL_PLANE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace the scheduler of ``--dist loadfile``."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(_file_of(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
