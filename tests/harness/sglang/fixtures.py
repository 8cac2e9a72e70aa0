"""Fixtures for tests of SGLang. One Redis, one sidecar and three engines serve all tests of a worker.

Tests have prompts of their own. The fixtures of a test wait until the engines use the sidecar, so that a test
may kill the sidecar. It starts again what it has killed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.sglang.engine import SGLangEngine, Storage
from tests.harness.sglang.world import BUFFERED, World, serving, serving_world, wait_attached


@pytest.fixture(scope="session")
def sglang_programs() -> None:
    """Tests that use it run on one worker, which imports SGLang once (``distribution.UNITS``)."""


@pytest.fixture
def start_sglang(sglang_programs, tmp_path) -> Iterator[Callable[..., SGLangEngine]]:
    """Returns a function that starts an engine and waits until it is ready. The engines end with the test.

    Its arguments are those of ``SGLangEngine`` without ``log``.
    """
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def start(storage: Storage | None = None, **arguments: Any) -> SGLangEngine:
            log = tmp_path / f"sglang-{next(numbers)}.log"
            return stack.enter_context(SGLangEngine(log, storage, **arguments)).wait_ready()

        yield start


@pytest.fixture(scope="session")
def sglang(sglang_programs, tmp_path_factory) -> Iterator[World]:
    with serving_world(tmp_path_factory.mktemp("sglang")) as made:
        yield made


@pytest.fixture(scope="session")
def _sglang_engine(sglang) -> Iterator[SGLangEngine]:
    with serving(sglang.logs, sglang.storage) as engine:
        yield engine


@pytest.fixture(scope="session")
def _sglang_buffered(sglang) -> Iterator[SGLangEngine]:
    with serving(sglang.logs, sglang.storage, **BUFFERED) as engine:
        yield engine


@pytest.fixture
def sglang_engine(sglang, _sglang_engine) -> SGLangEngine:
    """An engine that also caches in host memory."""
    wait_attached(_sglang_engine, sglang.sidecar)
    return _sglang_engine


@pytest.fixture
def sglang_buffered(sglang, _sglang_buffered) -> SGLangEngine:
    """An engine with ``BUFFERED``."""
    wait_attached(_sglang_buffered, sglang.sidecar)
    return _sglang_buffered
