from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache.tiers.circuit import Backoff, CircuitBreaker, JointBreaker, RetryStale


class TestCircuitBreaker:
    @pytest.fixture(autouse=True)
    def breaker(self):
        self.now = 100.0
        self.breaker = CircuitBreaker(0.1, 0.5, clock=lambda: self.now)

    def test_opens_at_the_first_failure_and_says_when_to_try(self):
        assert not self.breaker.is_open
        assert self.breaker.seconds_to_trial == 0
        self.breaker.failure()
        assert self.breaker.is_open
        assert self.breaker.seconds_to_trial == pytest.approx(0.1)
        self.now += 1
        assert self.breaker.is_open
        assert self.breaker.seconds_to_trial == 0

    def test_waits_twice_as_long_each_time_up_to_the_cap(self):
        waits = []
        for _ in range(10_000):
            self.breaker.failure()
            waits.append(self.breaker.seconds_to_trial)
        assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.5])
        assert waits[-1] == pytest.approx(0.5)

    def test_success_forgets_failures(self):
        self.breaker.failure()
        self.breaker.failure()
        self.breaker.success()
        assert not self.breaker.is_open
        self.breaker.failure()
        assert self.breaker.seconds_to_trial == pytest.approx(0.1)

    def test_a_trial_closes_without_forgetting(self):
        self.breaker.failure()
        self.breaker.trial_succeeded()
        assert not self.breaker.is_open
        self.breaker.failure()
        assert self.breaker.seconds_to_trial == pytest.approx(0.2)

    def test_a_joint_circuit_is_open_when_all_are(self):
        parts = [CircuitBreaker(0.1, 0.5, clock=lambda: self.now) for _ in range(2)]
        joint = JointBreaker(lambda: parts)
        parts[0].failure()
        assert not joint.is_open
        assert joint.seconds_to_trial == 0
        parts[1].failure()
        parts[1].failure()
        assert joint.is_open
        assert joint.seconds_to_trial == pytest.approx(0.1)


@given(st.integers(1, 10**9), st.floats(1e-3, 10), st.floats(1e-3, 1e3))
def test_backoff_doubles_up_to_its_cap(failures, base, cap):
    backoff = Backoff(base, cap)
    assert backoff.compute(1) == min(base, cap)
    assert backoff.compute(failures) <= backoff.compute(failures + 1) <= cap
    assert backoff.compute(failures + 1) == min(cap, 2 * backoff.compute(failures)) or failures > 30


@pytest.mark.parametrize(
    ("error", "was_idle", "again"),
    [
        (ConnectionResetError(), True, True),
        (BrokenPipeError(), True, True),
        (ConnectionResetError(), False, False),
        (TimeoutError(), True, False),
    ],
)
def test_only_a_connection_that_went_stale_is_tried_again(error, was_idle, again):
    assert RetryStale().allows(error, was_idle=was_idle) is again
