"""Guard in front of a medium that may be unavailable."""

import logging

import pytest

from lmcache.storage_backend.guard import FaultLog, Guard
from lmcache_store.tiers.circuit import Circuit
from testing.child_process import wait_until


def unavailable() -> None:
    raise ConnectionError


def guard_of(probe) -> tuple[Circuit, Guard]:
    circuit = Circuit("medium", probe, base=0.001, cap=0.001)
    return circuit, Guard(circuit, FaultLog(logging.getLogger("test")))


def test_probes_continue_after_an_unexpected_error():
    outcomes = iter([RuntimeError("a bug"), OSError(), None])

    def probe() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    circuit, guard = guard_of(probe)
    assert guard.call("A get", unavailable, "default") == "default"
    wait_until(lambda: not circuit.is_open)
    assert guard.call("A get", lambda: "found", "default") == "found"
    guard.close()


def test_makes_no_calls_while_the_medium_is_unavailable():
    _, guard = guard_of(unavailable)
    guard.call("A get", unavailable, None)
    assert guard.call("A get", lambda: pytest.fail("called"), "default") == "default"
    guard.close()
