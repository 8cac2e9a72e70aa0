"""What stands before a medium that may be unavailable."""

from __future__ import annotations

import logging

import pytest

from lmcache.storage_backend.guard import FaultLog, Guard
from lmcache.tiers.circuit import Circuit
from testing.child_process import wait_until


def unavailable() -> None:
    raise ConnectionError


def guard_of(probe) -> tuple[Circuit, Guard]:
    circuit = Circuit("medium", probe, base=0.001, cap=0.001)
    return circuit, Guard(circuit, FaultLog(logging.getLogger("test")))


def test_a_probe_that_ends_with_an_error_is_not_the_last():
    outcomes = iter([RuntimeError("what nobody thought of"), OSError(), None])

    def probe() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    circuit, guard = guard_of(probe)
    assert guard.call("A get", unavailable, "otherwise") == "otherwise"
    wait_until(lambda: not circuit.is_open)
    assert guard.call("A get", lambda: "found", "otherwise") == "found"
    guard.close()


def test_while_it_is_unavailable_nothing_is_asked():
    _, guard = guard_of(unavailable)
    guard.call("A get", unavailable, None)
    assert guard.call("A get", lambda: pytest.fail("asked"), "otherwise") == "otherwise"
    guard.close()
