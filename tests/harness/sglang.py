"""Fixtures for tests of SGLang."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.sglang.engine import SGLangEngine, Storage


@pytest.fixture
def start_sglang(tmp_path) -> Iterator[Callable[..., SGLangEngine]]:
    """Returns a function that starts an engine and waits until it is ready. The engines end with the test.

    Its arguments are those of ``SGLangEngine`` without ``log``.
    """
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def start(storage: Storage | None = None, **arguments: Any) -> SGLangEngine:
            log = tmp_path / f"sglang-{next(numbers)}.log"
            return stack.enter_context(SGLangEngine(log, storage, **arguments)).wait_ready()

        yield start
