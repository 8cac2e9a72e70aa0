"""A pytest plugin: how much of the exhaustive tests a run does.

A run for a change does a third: ``examples`` and ``third`` return fewer cases, and two of three tests marked
``rotating`` are deselected. The commit chooses the third, so a failure repeats at the same commit, and later
commits do the rest. ``make test-all`` does everything, and ten times the random examples
(``LMCACHE_TEST_SCOPE=all``). A file that you name runs whole. ``LMCACHE_TEST_SEED`` replaces the commit.
"""

import contextlib
import os
import subprocess
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
NUM_PARTS = 3
IS_COMPLETE = os.environ.get("LMCACHE_TEST_SCOPE", "change") == "all"

with contextlib.suppress(ModuleNotFoundError):  # tests on a GPU need no hypothesis
    from hypothesis import settings

    # A busy machine must not fail a test, so examples have no deadline. Runs for a change repeat examples.
    settings.register_profile("change", deadline=None, derandomize=True, max_examples=100 // NUM_PARTS)
    settings.register_profile("all", deadline=None, max_examples=1000)
    settings.load_profile("all" if IS_COMPLETE else "change")


@cache
def seed() -> int:
    """Return the number that chooses the cases of this run."""
    if given := os.environ.get("LMCACHE_TEST_SEED"):
        return int(given)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a machine without git
        return 0
    return int(done.stdout[:8], 16) if done.returncode == 0 else 0  # 0: a source archive


def examples(number: int) -> int:
    """Return how many of ``number`` random examples this run does: a third, or ten times as many."""
    return number * 10 if IS_COMPLETE else max(1, number // NUM_PARTS)


def is_chosen(name: str) -> bool:
    """Whether this run does the case ``name``."""
    return IS_COMPLETE or zlib.crc32(f"{seed()} {name}".encode()) % NUM_PARTS == 0


def third(cases: Sequence[T]) -> list[T]:
    """Return every third case, from one that the commit chooses, or all cases."""
    return list(cases) if IS_COMPLETE else list(cases[seed() % min(NUM_PARTS, len(cases)) :: NUM_PARTS])


def pytest_configure(config: pytest.Config) -> None:
    """Give the seed to the workers of pytest-xdist."""
    os.environ["LMCACHE_TEST_SEED"] = str(seed())


def pytest_report_header() -> str:
    """Print how to repeat this choice."""
    return f"scope: {'all' if IS_COMPLETE else 'a third of the exhaustive tests'}, LMCACHE_TEST_SEED={seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the rotating tests that this run does not do, unless their file was asked for by name."""
    named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    dropped = [item for item in items if not named and not _is_done(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


def _is_done(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("rotating")
    if mark is None:
        return True
    return is_chosen(str(item.path.name) if mark.args == ("file",) else item.nodeid)
