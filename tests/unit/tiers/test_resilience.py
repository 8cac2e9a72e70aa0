from __future__ import annotations

import pytest

from lmcache.tiers.resilience import CircuitBreaker
from lmcache.tiers.resp import Address


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


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", Address("cache", 6379, "", 0, "", "")),
        ("redis://cache:7000/3", Address("cache", 7000, "", 3, "", "")),
        ("redis://:s%40c@cache/1", Address("cache", 6379, "", 1, "", "s@c")),
        ("redis://me:pw@[::1]:7000", Address("::1", 7000, "", 0, "me", "pw")),
        ("unix:///run/redis.sock", Address("", 0, "/run/redis.sock", 0, "", "")),
        ("unix://me:pw@/run/redis.sock?db=2", Address("", 0, "/run/redis.sock", 2, "me", "pw")),
    ],
)
def test_urls(url, address):
    assert Address.parse(url) == address


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("rediss://:secret@cache", "TLS .* is not supported yet"),
        ("http://:secret@cache", "scheme 'http' is not one of"),
        ("cache:6379", "scheme 'cache' is not one of"),
        ("redis://:secret@", "needs a host"),
        ("redis://:secret@cache:port", "host or port"),
        ("redis://:secret@cache:99999", "host or port"),
        ("redis://:secret@cache/zero", "database 'zero' is not a number"),
        ("unix://run/redis.sock", "absolute path"),
        ("unix://", "absolute path"),
    ],
)
def test_bad_urls_say_what_is_wrong_and_keep_the_password(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        Address.parse(url)
    assert "secret" not in str(caught.value)


def test_an_address_shows_no_password():
    address = Address.parse("redis://me:secret@cache:7000")
    assert str(address) == "cache:7000"
    assert "secret" not in repr(address)
