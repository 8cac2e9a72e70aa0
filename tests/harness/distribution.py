"""A pytest plugin that assigns test files to the workers of pytest-xdist.

Each file runs on one worker. All files that use the control plane of the run share a worker, which runs them
first: a second control plane would cost a minute of processor time. These tests mostly wait for Kubernetes,
so the other workers can use the processor. The files with SGLang share a worker, too, and its engines.
"""

from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

UNITS = {"plane": "control plane", "sglang_programs": "SGLang"}
"""Units of several files by the session's fixture that their tests use, in the order in which they begin."""


def units_of(items: Iterable[pytest.Item]) -> dict[str, str]:
    """Return the unit of work of each file: its name, or the one of all files that use a fixture."""
    units: dict[str, str] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        shared = (unit for fixture, unit in UNITS.items() if _uses(item, fixture))
        units[file] = next(shared, units.get(file, file))
    return units


def _uses(item: pytest.Item, fixture: str) -> bool:
    """Whether the test requests this fixture of the session, and not one of its own module."""
    info: Any = getattr(item, "_fixtureinfo", None)
    definitions: Any = info.name2fixturedefs.get(fixture) if info else ()
    return bool(definitions) and definitions[-1].scope == "session"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse sets of parameters: their order differs between workers, and pytest-xdist then runs no test."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names, values = mark.args[:2] if len(mark.args) > 1 else ("", mark.kwargs.get("argvalues"))
        if isinstance(values, (set, frozenset)):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: sort the set of parameters {names!r}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move units of several files to the front."""
    units, order = units_of(items), list(UNITS.values())
    begins = {file: order.index(unit) if unit in order else len(order) for file, unit in units.items()}
    items.sort(key=lambda item: begins[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Generator[None]:
    """Send the unit of each test to the scheduler, at the end of the test's id.

    The scheduler's process collects no tests. It gets the ids of ``session.items``, which a worker sends in
    this hook.
    """
    items, units = session.items, units_of(session.items)
    if hasattr(session.config, "workerinput"):
        ids = [f"{item.nodeid}@{units[item.nodeid.partition('::')[0]]}" for item in items]
        session.items = [SimpleNamespace(nodeid=name) for name in ids]
    yield
    session.items = items


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace the scheduler of ``--dist loadfile``."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("@")[2]

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
