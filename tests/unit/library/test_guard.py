"""What stands before a medium that may be away."""

from __future__ import annotations

import logging

import pytest

from lmcache.storage_backend.faults import FaultLog
from lmcache.storage_backend.guard import Guard
from lmcache.tiers.circuit import CircuitBreaker
from testing.child_process import wait_until


def away() -> None:
    raise ConnectionError


@pytest.fixture
def breaker():
    return CircuitBreaker(base=0.001, cap=0.001)


def test_a_trial_that_ends_with_an_error_is_not_the_last(breaker):
    outcomes = iter([RuntimeError("what nobody thought of"), OSError(), None])

    def try_again() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome
        breaker.trial_succeeded()

    guard = Guard(breaker, try_again, FaultLog(logging.getLogger("test")))
    assert guard.call("A get", away, "otherwise") == "otherwise"
    wait_until(lambda: not guard.is_open)
    assert guard.call("A get", lambda: "found", "otherwise") == "found"
    guard.close()


def test_while_it_is_away_nothing_is_asked(breaker):
    guard = Guard(breaker, breaker.failure, FaultLog(logging.getLogger("test")))
    guard.call("A get", away, None)
    assert guard.call("A get", lambda: pytest.fail("asked"), "otherwise") == "otherwise"
    guard.close()
